// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

/** A count, with separators. */
export function count(number) {
  return whole.format(number);
}

/** A count with its noun. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A rate with three digits; a dash when it is not known. */
export function rate(number) {
  if (number === null) return "–";
  return number < 99.95 ? number.toFixed(1) : count(Math.round(number));
}

/** Seconds from milliseconds. */
export function seconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(milliseconds < 9995 ? 2 : 0)} s`;
}

/** A range of shares: `51–92 %`. */
export function percent([low, high]) {
  return `${span(Math.round(100 * low), Math.round(100 * high))} %`;
}

/** A range of factors: `2.3–13×`. */
export function times([low, high]) {
  const word = (factor) => (factor < 9.95 ? factor.toFixed(1) : count(Number(factor.toPrecision(2))));
  return `${span(word(low), word(high))}×`;
}

function span(low, high) {
  return low === high ? `${low}` : `${low}–${high}`;
}
