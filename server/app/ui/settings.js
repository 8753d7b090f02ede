// Settings of a request: fields of a form, and from them the fields of a body.
import { html } from "./html.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 to 2", "0.1"],
  ["top_p", "Top p", "0 to 1", "0.05"],
  ["top_k", "Top k", "all", "1"],
  ["min_p", "Min p", "0 to 1", "0.05"],
  ["repetition_penalty", "Repetition penalty", "1: none", "0.05"],
  ["max_tokens", "Longest answer", "tokens", "1"],
  ["seed", "Seed", "random", "1"],
];

const OVERFLOW = "When the context is full";
const OVERFLOWS = [
  ["", "the server's default"],
  ["stop", "end the answer"],
  ["drop_turns", "drop the oldest turns"],
  ["shift", "drop the oldest tokens"],
];

export const EMPTY = { system: "" };
export const SETTING_NAMES = ["system", "context_overflow", ...NUMBERS.map(([name]) => name)];

// A message of the server with the labels of this form for the fields of the API.
export const labelled = (message) =>
  [["context_overflow", OVERFLOW], ...NUMBERS].reduce((text, [name, label]) => text.replaceAll(new RegExp(`(?<![\\w.])${name}(?![\\w.])`, "g"), label), message);

// Throws an Error that a person understands where a field cannot be sent.
export function fields(settings) {
  const body = settings.context_overflow ? { context_overflow: settings.context_overflow } : {};
  for (const [name, label] of NUMBERS) {
    const written = (settings[name] ?? "").trim();
    if (written === "") continue;
    const value = Number(written);
    if (!Number.isFinite(value)) throw new Error(`${label} must be a number, not ${written}`);
    body[name] = value;
  }
  return body;
}

const LONGEST_ANSWER = "4096"; // for models that never end an answer

// What the model's authors recommend, as fields of the form, and a limit on the answer.
export const starting = (model) => ({
  max_tokens: LONGEST_ANSWER,
  ...Object.fromEntries(Object.entries(model.recommended_sampling ?? {}).map(([name, value]) => [name, String(value)])),
});

export function NumberFields({ values, onChange, children }) {
  return html`<div class="grid">
    ${NUMBERS.map(
      ([name, label, hint, step]) => html`<label>${label}
        <input type="number" step=${step} placeholder=${hint} value=${values[name] ?? ""}
          onInput=${(event) => onChange({ ...values, [name]: event.currentTarget.value })} />
      </label>`,
    )}
    ${children}
  </div>`;
}

export function Settings({ values, model, onChange }) {
  const set = (name) => (event) => onChange({ ...values, [name]: event.currentTarget.value });
  return html`<details class="settings">
    <summary>Settings</summary>
    <label class="wide">System prompt
      <textarea rows="2" value=${values.system} onInput=${set("system")} placeholder="None: the chat template's own"></textarea>
    </label>
    <${NumberFields} values=${values} onChange=${onChange}>
      <label class="double">${OVERFLOW}
        <select value=${values.context_overflow ?? ""} onChange=${set("context_overflow")}>
          ${OVERFLOWS.filter(([name]) => name !== "shift" || !model.context?.shift_refusal).map(([name, title]) => html`<option value=${name}>${title}</option>`)}
        </select></label>
    <//>
    <p class="note">${model.recommended_sampling && "The first values are those that the model's authors recommend. "}Empty fields have the server's defaults.</p>
  </details>`;
}
