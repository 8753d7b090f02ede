// A rotary scaling as a person picks it: a kind, sliders for its fields, or JSON; and from that the field of a request.
import { html } from "./html.js";
import { scaling as readScaling } from "./settings.js";

// Field, label, lowest, highest, step, start. `original_max_position_embeddings` is the model's where it is left out.
const FACTOR = ["factor", "Factor", 1, 64, 0.5, 4];
export const KINDS = {
  default: ["No scaling", []],
  linear: ["Linear (position interpolation)", [FACTOR]],
  ntk: ["NTK-aware", [FACTOR]],
  dynamic: ["Dynamic NTK", [FACTOR]],
  yarn: ["YaRN", [FACTOR, ["beta_fast", "Beta fast", 1, 128, 1, 32], ["beta_slow", "Beta slow", 0.25, 16, 0.25, 1]]],
  llama3: ["Llama 3", [FACTOR, ["low_freq_factor", "Low-frequency factor", 0.5, 8, 0.5, 1], ["high_freq_factor", "High-frequency factor", 1, 32, 0.5, 4]]],
  proportional: ["Proportional", [FACTOR]],
};
const OWN = "own";
const JSON_KIND = "json";

export const startOf = (kind) => ({
  kind,
  fields: Object.fromEntries((KINDS[kind]?.[1] ?? []).map(([name, , , , , start]) => [name, start])),
  text: "",
});
export const SERVERS_OWN = startOf(OWN);

// The value of `rope_scaling`; undefined for the server's own. Throws an Error that a person understands.
export function valueOf({ kind, fields, text }) {
  if (kind === OWN) return undefined;
  if (kind === JSON_KIND) return readScaling(text).rope_scaling;
  if (kind.startsWith("profile:")) return kind.slice(8);
  return { rope_type: kind, ...fields };
}

// Its field of a body.
export function fieldOf(picked) {
  const value = valueOf(picked);
  return value === undefined ? {} : { rope_scaling: value };
}

// As it is written: empty for the server's own.
export function writtenOf(picked) {
  const value = valueOf(picked);
  return value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

export function nameOf(picked) {
  const { kind, fields } = picked;
  if (kind === OWN) return "the server's own";
  if (kind === JSON_KIND) return "the JSON";
  if (kind.startsWith("profile:")) return kind.slice(8);
  return fields.factor === undefined ? KINDS[kind][0] : `${KINDS[kind][0]}, factor ${fields.factor}`;
}

export function ScalingPicker({ label, value, profiles = [], onChange }) {
  const { kind, fields, text } = value;
  const choose = (event) => {
    const next = event.currentTarget.value;
    const kept = next === JSON_KIND ? safelyWritten(value) : "";
    onChange({ ...startOf(next), text: kept });
  };
  const set = (name) => (event) => onChange({ ...value, fields: { ...fields, [name]: Number(event.currentTarget.value) } });
  return html`<fieldset class="picker">
    <legend>${label}</legend>
    <label>Kind
      <select value=${kind} onChange=${choose}>
        <option value=${OWN}>The server's own</option>
        ${Object.entries(KINDS).map(([name, [title]]) => html`<option value=${name}>${title}</option>`)}
        ${profiles.map((name) => html`<option value=${`profile:${name}`}>Profile ${name}</option>`)}
        <option value=${JSON_KIND}>JSON</option>
      </select>
    </label>
    ${(KINDS[kind]?.[1] ?? []).map(
      ([name, title, lowest, highest, step]) => html`<label class="slider">${title} <span class="value">${fields[name]}</span>
        <input type="range" min=${lowest} max=${highest} step=${step} value=${fields[name]} onInput=${set(name)} />
      </label>`,
    )}
    ${kind === JSON_KIND && html`<label>JSON
      <textarea rows="3" class="mono" spellcheck=${false} autocapitalize="off" placeholder='{"rope_type": "yarn", "factor": 4}' value=${text}
        onInput=${(event) => onChange({ ...value, text: event.currentTarget.value })}></textarea>
    </label>`}
  </fieldset>`;
}

function safelyWritten(value) {
  try {
    return writtenOf(value);
  } catch {
    return value.text;
  }
}
