// A rotary scaling as a person picks it: a kind, sliders for its fields, or text; and from that the field of a request.
import { html } from "./html.js";

const TITLES = {
  default: "No scaling", linear: "Linear", ntk: "NTK-aware", dynamic: "Dynamic NTK", yarn: "YaRN", llama3: "Llama 3",
  proportional: "Proportional", dual_chunk: "Dual chunk attention", self_extend: "Self-Extend", rerope: "ReRoPE", log_n: "Log-n attention",
};
const FIELD_TITLES = {
  factor: "Factor", beta_fast: "Beta fast", beta_slow: "Beta slow", low_freq_factor: "Low-frequency factor", high_freq_factor: "High-frequency factor",
  chunk_size: "Chunk size", local_size: "Local size", group_size: "Group size", window: "Window",
};
const OWN = "own";
const AUTO = "auto";
const TEXT = "text";
const PROFILE = "profile:";
const EXAMPLE = 'yarn 4, or {"rope_type": "yarn", "factor": 4}';

// kinds: of GET /v1/rotary, the lowest and highest value and the start of each field.
export const startOf = (kind, kinds = {}) => ({
  kind,
  fields: Object.fromEntries(Object.entries(kinds[kind] ?? {}).map(([name, [, , start]]) => [name, start])),
  text: "",
});
export const SERVERS_OWN = startOf(OWN);

// The value of `rope_scaling`; undefined for the server's own. Throws an Error that a person understands.
export function valueOf({ kind, fields, text }) {
  if (kind === OWN) return undefined;
  if (kind === AUTO) return AUTO;
  if (kind.startsWith(PROFILE)) return kind.slice(PROFILE.length);
  if (kind !== TEXT) return { rope_type: kind, ...fields };
  const written = text.trim();
  if (!written.startsWith("{")) return written || undefined; // the server reads the short form
  try {
    return JSON.parse(written);
  } catch {
    throw new Error(`The rotary scaling is not valid JSON: write ${EXAMPLE}`);
  }
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
  const { kind, fields, text } = picked;
  if (kind === OWN) return "the server's own";
  if (kind === TEXT) return text.trim().startsWith("{") ? "the JSON" : text.trim().slice(0, 60) || "the server's own";
  if (kind === AUTO) return "auto";
  if (kind.startsWith(PROFILE)) return kind.slice(PROFILE.length);
  const title = TITLES[kind] ?? kind;
  return fields.factor === undefined ? title : `${title}, factor ${fields.factor}`;
}

// scalings: {kinds, profiles, policy}, of GET /v1/rotary.
export function ScalingPicker({ label, value, scalings, onChange }) {
  const { kind, fields, text } = value;
  const { kinds, profiles, policy } = scalings;
  const choose = (event) => {
    const next = event.currentTarget.value;
    onChange({ ...startOf(next, kinds), text: next === TEXT ? safelyWritten(value) : "" });
  };
  const set = (name) => (event) => onChange({ ...value, fields: { ...fields, [name]: Number(event.currentTarget.value) } });
  const named = kind.startsWith(PROFILE) && !profiles.includes(kind.slice(PROFILE.length)) ? [...profiles, kind.slice(PROFILE.length)] : profiles;
  return html`<fieldset class="picker">
    <legend>${label}</legend>
    <label>Kind
      <select value=${kind} onChange=${choose} disabled=${policy === "off"}>
        <option value=${OWN}>The server's own</option>
        ${policy !== "off" && html`<option value=${AUTO}>Auto, by length</option>`}
        ${policy === "allow" && Object.keys(kinds).map((name) => html`<option value=${name}>${TITLES[name] ?? name}</option>`)}
        ${named.map((name) => html`<option value=${PROFILE + name}>Profile ${name}</option>`)}
        ${policy !== "off" && html`<option value=${TEXT}>As text</option>`}
      </select>
    </label>
    ${Object.entries(kinds[kind] ?? {}).map(([name, [lowest, highest]]) => html`<label class="slider">${FIELD_TITLES[name] ?? name} <span class="value">${fields[name]}</span>
        <input type="range" min=${lowest} max=${highest} step=${highest > 64 ? 1 : 0.25} value=${fields[name]} onInput=${set(name)} />
      </label>`)}
    ${kind === TEXT && html`<label>Scaling
      <textarea rows="2" class="mono" spellcheck=${false} autocapitalize="off" placeholder=${EXAMPLE} value=${text}
        onInput=${(event) => onChange({ ...value, text: event.currentTarget.value })}></textarea>
    </label>`}
    ${policy === "off" && html`<p class="note">This server does not let requests change the scaling.</p>`}
  </fieldset>`;
}

function safelyWritten(value) {
  try {
    return writtenOf(value);
  } catch {
    return value.text;
  }
}
