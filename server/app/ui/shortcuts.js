// Keyboard shortcuts of the chat, and the sheet that lists them.
import { Component, createRef, html } from "./html.js";

// Key, effect, name of the action. Single letters act outside of text fields only.
export const SHORTCUTS = [
  ["/", "write a message", "focus"],
  ["n", "new chat", "new"],
  ["l", "show or hide the conversations", "list"],
  ["c", "compare two scalings", "compare"],
  ["r", "generate the last answer again", "retry"],
  ["e", "edit the last message", "edit"],
  ["s", "show or hide the settings", "settings"],
  ["?", "show these shortcuts", "help"],
];
const FIXED = [
  ["Enter", "send the message"],
  ["Shift+Enter", "insert a line break"],
  ["Escape", "stop the answer, else leave the text field"],
];

const isField = (target) => target.matches("input, textarea, select, [contenteditable]");

// The action of a key press, or undefined.
export function actionOf(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || isField(event.target)) return undefined;
  return SHORTCUTS.find(([key]) => key === event.key)?.[2];
}

export class HelpSheet extends Component {
  dialog = createRef();

  componentDidMount() {
    this.dialog.current.showModal();
  }

  render({ onClose }) {
    return html`<dialog ref=${this.dialog} onClose=${onClose} aria-labelledby="shortcuts">
      <h2 id="shortcuts">Keyboard shortcuts</h2>
      <dl class="shortcuts">${[...FIXED, ...SHORTCUTS].map(([key, effect]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${effect}</dd></div>`)}</dl>
      <p class="note">Letters act while no text field has the focus.</p>
      <form method="dialog"><button class="primary">Close</button></form>
    </dialog>`;
  }
}
