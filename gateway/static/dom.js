// Creates and fills elements. Data always becomes text nodes: the dashboard never parses data as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element. `on...` attributes are listeners, `style` is an object; null, undefined and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element by the same rules. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** Append nodes, texts and nested lists of them; null, undefined and false are left out. */
export function add(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replace all children of an element. */
export function replace(element, ...children) {
  element.replaceChildren();
  return add(element, ...children);
}

/** Set the text of an element only if it differs, which avoids needless layout and announcements. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let counted = 0;

/** Return a unique element id. */
export function freshId(prefix) {
  counted += 1;
  return `${prefix}-${counted}`;
}

/** Announce a text to screen readers. */
export function announce(text) {
  document.getElementById("announcements").textContent = text;
}
