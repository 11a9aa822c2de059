// A part of the page that can be folded away.

/** Shows and hides a panel by its button; where there is room, it is there from the start. */
export class Panel {
  #panel;
  #button;

  constructor(panel, button) {
    this.#panel = panel;
    this.#button = button;
    button.addEventListener("click", () => this.#show(panel.hidden));
    this.#show(matchMedia("(min-width: 62rem)").matches);
  }

  #show(shown) {
    this.#panel.hidden = !shown;
    this.#button.ariaExpanded = String(shown);
  }
}
