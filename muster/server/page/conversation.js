// What was said.

/** Questions and answers, oldest first. */
export class Conversation {
  #exchanges = [];

  /** Adds a question; the exchange whose `answer` is filled as it comes. */
  ask(question) {
    const exchange = { question, answer: "" };
    this.#exchanges.push(exchange);
    return exchange;
  }

  /** The messages that the model reads. A question that got no answer is left out, but for the last. */
  messages(system) {
    const told = this.#exchanges.filter((exchange) => exchange.answer || exchange === this.#exchanges.at(-1));
    const said = told.flatMap(({ question, answer }) => [
      { role: "user", content: question },
      ...(answer ? [{ role: "assistant", content: answer }] : []),
    ]);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}
