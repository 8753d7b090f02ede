// Settings of a request: fields of a form, and from them the fields of a body.
import { html } from "./html.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 to 2", "0.1"],
  ["top_p", "Top p", "0 to 1", "0.05"],
  ["top_k", "Top k", "all", "1"],
  ["min_p", "Min p", "0 to 1", "0.05"],
  ["max_tokens", "Longest answer", "tokens", "1"],
  ["seed", "Seed", "random", "1"],
];

export const EMPTY = { system: "" };
export const SETTING_NAMES = ["system", ...NUMBERS.map(([name]) => name)];

// Throws an Error that a person understands where a field cannot be sent.
export function fields(settings) {
  const body = {};
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

export function NumberFields({ values, onChange }) {
  return html`<div class="grid">
    ${NUMBERS.map(
      ([name, label, hint, step]) => html`<label>${label}
        <input type="number" step=${step} placeholder=${hint} value=${values[name] ?? ""}
          onInput=${(event) => onChange({ ...values, [name]: event.currentTarget.value })} />
      </label>`,
    )}
  </div>`;
}

export function Settings({ values, recommended, onChange }) {
  const set = (name) => (event) => onChange({ ...values, [name]: event.currentTarget.value });
  return html`<details class="settings">
    <summary>Settings</summary>
    <label class="wide">System prompt
      <textarea rows="2" value=${values.system} onInput=${set("system")} placeholder="None: the chat template's own"></textarea>
    </label>
    <${NumberFields} values=${values} onChange=${onChange} />
    <p class="note">${recommended && "The first values are those that the model's authors recommend. "}Empty fields have the server's defaults.</p>
  </details>`;
}
