// Building blocks of the page. Strings become text nodes; there is no way to pass HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element of index.html with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** An HTML element with attributes and children, which are elements or strings. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** As `element`, of SVG. */
export function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** Sets a text where it differs, so that a screen reader is told of changes alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
