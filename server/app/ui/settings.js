// Settings of a request in addition to its messages: fields of a form, and the fields of the body made from them.
import { html } from "./html.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 to 2", "0.1"],
  ["top_p", "Top p", "0 to 1", "0.05"],
  ["top_k", "Top k", "all", "1"],
  ["min_p", "Min p", "0 to 1", "0.05"],
  ["max_tokens", "Longest answer", "tokens", "1"],
  ["seed", "Seed", "random", "1"],
];

export const EMPTY = { system: "", scaling: "" };

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

// A scaling as it is written: empty for the server's own, a name, or a JSON object.
export function scaling(written) {
  const text = written.trim();
  if (text === "") return {};
  if (!text.startsWith("{")) return { rope_scaling: text };
  try {
    return { rope_scaling: JSON.parse(text) };
  } catch {
    throw new Error('The rotary scaling is no JSON. An example: {"rope_type": "yarn", "factor": 4}');
  }
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
    <p class="note">${recommended && "It begins with what the model's authors recommend. "}What is left empty is as the server has it.</p>
  </details>`;
}
