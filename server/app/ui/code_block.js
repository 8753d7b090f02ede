// A block of code in the colors of its language. highlight.js is loaded with the first block.
import { Component, html } from "./html.js";
import { copyText } from "./clipboard.js";

const MOST_CHARACTERS = 30_000; // longer code is shown in one color
let library = null;

// Nodes of highlight.js as elements: never as HTML.
const shown = (node) => (typeof node === "string" ? node : html`<span class=${classOf(node.scope)}>${node.children.map(shown)}</span>`);
const classOf = (scope) => (scope ? `hl-${scope.split(".")[0]}` : undefined);

function colored(text, language) {
  if (!library || !language || text.length > MOST_CHARACTERS || !library.getLanguage(language)) return text;
  return library.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(shown);
}

export class CodeBlock extends Component {
  async componentDidMount() {
    if (library) return;
    library = (await import("./vendor/highlight.mjs")).default;
    this.forceUpdate();
  }

  shouldComponentUpdate(next) {
    return next.text !== this.props.text || next.language !== this.props.language;
  }

  render({ text, language }) {
    return html`<div class="code">
      <div class="bar"><span>${language || "text"}</span>
        <button type="button" class="quiet" onClick=${(event) => copyText(text, event.currentTarget)}>Copy</button></div>
      <pre tabindex="0" aria-label="Code"><code>${colored(text, language)}</code></pre>
    </div>`;
  }
}
