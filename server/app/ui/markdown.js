// Markdown as elements. No HTML is ever made of the model's text: tags in it are shown as they are written, pictures as links.
import { html } from "./html.js";
import { lexer } from "./vendor/marked.esm.js";

const SAFE = /^(https?:|mailto:)/i;
const DEEPEST = 30; // what is nested deeper is shown as it is written: reading and drawing recurse, and the stack has an end

export function Markdown({ text }) {
  let shown;
  try {
    shown = blocks(lexer(text, { gfm: true }), 0);
  } catch {
    shown = html`<p class="plain">${text}</p>`; // nested too deep for the lexer
  }
  return html`<div class="markdown">${shown}</div>`;
}

const blocks = (tokens, depth) => tokens.map((token) => (depth > DEEPEST ? token.raw : block(token, depth + 1)));

// depth: nesting of the tokens inside this one.
function block(token, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page has headings of its own: an answer's are no part of its outline.
      return html`<p class=${`heading h${token.depth}`}>${inlines(token.tokens, depth)}</p>`;
    case "code":
      return html`<${Code} text=${token.text} language=${token.lang} />`;
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
      return token.tokens ? html`<span>${inlines(token.tokens, depth)}</span>` : token.text;
    default:
      return html`<p>${token.raw}</p>`;
  }
}

const inlines = (tokens = [], depth) => tokens.map((token) => (depth > DEEPEST ? token.raw : inline(token, depth + 1)));

function inline(token, depth) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inlines(token.tokens, depth)}</strong>`;
    case "em":
      return html`<em>${inlines(token.tokens, depth)}</em>`;
    case "del":
      return html`<del>${inlines(token.tokens, depth)}</del>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "br":
      return html`<br />`;
    case "link":
    case "image":
      return SAFE.test(token.href)
        ? html`<a href=${token.href} target="_blank" rel="noreferrer noopener nofollow">${token.text || token.href}</a>`
        : token.raw;
    case "escape":
      return token.text;
    case "text":
      return token.tokens ? inlines(token.tokens, depth) : token.text;
    default:
      return token.raw;
  }
}

function Code({ text, language }) {
  const copy = (event) => copyText(text, event.currentTarget);
  return html`<div class="code">
    <div class="bar"><span>${language || "text"}</span><button type="button" class="quiet" onClick=${copy}>Copy</button></div>
    <pre tabindex="0" aria-label="Code"><code>${text}</code></pre>
  </div>`;
}

// Shows the result on the button.
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
