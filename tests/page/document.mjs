// As much of a document as engine/api/page/markdown.mjs uses; it remembers which elements were asked for.
export class FakeDocument {
  made = [];
  createElement(tag) {
    this.made.push(tag);
    return new FakeElement(tag);
  }
  createTextNode(text) {
    return {text, toString: () => escape(text)};
  }
}

const escape = text => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;');

class FakeElement {
  childNodes = [];
  constructor(tag) {
    this.tag = tag;
  }
  set textContent(text) {
    this.childNodes = [{text, toString: () => escape(text)}];
  }
  append(...nodes) {
    for (const node of nodes) node.remove = () => this.childNodes.splice(this.childNodes.indexOf(node), 1);
    this.childNodes.push(...nodes);
  }
  get lastChild() {
    return this.childNodes.at(-1);
  }
  toString() {
    const attributes = [this.className && ` class="${this.className}"`, this.start > 1 && ` start="${this.start}"`];
    return `<${this.tag}${attributes.filter(Boolean).join('')}>${this.childNodes.join('')}</${this.tag}>`;
  }
}
