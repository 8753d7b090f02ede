// Markdown as elements. No HTML is ever made of the model's text: tags in it are shown as they are written, pictures as links.
import { CodeBlock } from "./code_block.js";
import { html } from "./html.js";
import { lexer } from "./vendor/marked.esm.js";

const SAFE = /^(https?:|mailto:)/i;
const DEEPEST = 30; // what is nested deeper is shown as it is written: reading and drawing recurse, and the stack has an end

// A part of the text can be marked: two characters of Unicode's private use area enclose it while the text is read.
const [OPEN, CLOSE] = ["\ue000", "\ue001"];
const MARKED = new RegExp(`${OPEN}([^${CLOSE}]*)${CLOSE}?`);
const BLOCK_START = /^[ \t]*(?:(?:[-*+>]|#{1,6}|\d+[.)])[ \t]+|\n)*/; // would be none behind a mark

const unmarked = (text) => text.replace(/\ue000|\ue001|%EE%80%8[01]/gi, "");

function enclose(text, { at, length }) {
  const skipped = at === 0 || text[at - 1] === "\n" || text[at] === "\n" ? BLOCK_START.exec(text.slice(at))[0].length : 0;
  const [start, end] = [at + skipped, Math.max(at + length, at + skipped + 1)];
  return `${text.slice(0, start)}${OPEN}${text.slice(start, end)}${CLOSE}${text.slice(end)}`;
}

// A text without markup, with its mark as an element.
function plain(text) {
  const found = MARKED.exec(text);
  if (!found) return text.replace(CLOSE, "");
  const end = found.index + found[0].length;
  return html`${text.slice(0, found.index)}<mark title="The answers differ from here">${found[1]}</mark>${text.slice(end)}`;
}

// mark: {at, length} of a part of the text, or nothing.
export function Markdown({ text, mark }) {
  let shown;
  try {
    shown = blocks(lexer(mark ? enclose(text, mark) : text, { gfm: true }), 0);
  } catch {
    shown = html`<p class="plain">${text}</p>`; // nested too deep for the lexer
  }
  return html`<div class="markdown">${shown}</div>`;
}

const blocks = (tokens, depth) => tokens.map((token) => (depth > DEEPEST ? plain(token.raw) : block(token, depth + 1)));

// depth: of the contents of the token.
function block(token, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page has headings of its own: an answer's are no part of its outline.
      return html`<p class=${`heading h${token.depth}`}>${inlines(token.tokens, depth)}</p>`;
    case "code":
      return html`<${CodeBlock} text=${unmarked(token.text)} language=${unmarked(token.lang ?? "").split(/\s/)[0]} />`;
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens, depth)}</blockquote>`;
    case "hr":
      return html`<hr />`;
    case "list": {
      const items = token.items.map((item) => html`<li>${item.task ? (item.checked ? "☑ " : "☐ ") : ""}${blocks(item.tokens, depth)}</li>`);
      return token.ordered ? html`<ol start=${token.start}>${items}</ol>` : html`<ul>${items}</ul>`;
    }
    case "table":
      return html`<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>
        <thead><tr>${token.header.map((cell) => html`<th>${inlines(cell.tokens, depth)}</th>`)}</tr></thead>
        <tbody>${token.rows.map((row) => html`<tr>${row.map((cell) => html`<td>${inlines(cell.tokens, depth)}</td>`)}</tr>`)}</tbody>
      </table></div>`;
    case "paragraph":
      return html`<p>${inlines(token.tokens, depth)}</p>`;
    case "text":
      return token.tokens ? html`<span>${inlines(token.tokens, depth)}</span>` : plain(token.text);
    default:
      return html`<p>${plain(token.raw)}</p>`;
  }
}

const inlines = (tokens = [], depth) => tokens.map((token) => (depth > DEEPEST ? plain(token.raw) : inline(token, depth + 1)));

function inline(token, depth) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inlines(token.tokens, depth)}</strong>`;
    case "em":
      return html`<em>${inlines(token.tokens, depth)}</em>`;
    case "del":
      return html`<del>${inlines(token.tokens, depth)}</del>`;
    case "codespan":
      return html`<code>${plain(token.text)}</code>`;
    case "br":
      return html`<br />`;
    case "link":
    case "image":
      return SAFE.test(token.href)
        ? html`<a href=${unmarked(token.href)} target="_blank" rel="noreferrer noopener nofollow">${plain(token.text || unmarked(token.href))}</a>`
        : plain(token.raw);
    case "escape":
      return plain(token.text);
    case "text":
      return token.tokens ? inlines(token.tokens, depth) : plain(token.text);
    default:
      return plain(token.raw);
  }
}
