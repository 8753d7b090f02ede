// The rotary tab: the model's frequencies, and the effect of a scaling on them. The server computes all numbers.
import { ApiError, getJson, postJson } from "./api.js";
import { exact, HeatMap, Lines, short } from "./charts.js";
import { Component, html } from "./html.js";
import { copyText } from "./clipboard.js";
import { fieldOf, nameOf, ScalingPicker, startOf, valueOf, writtenOf } from "./scaling.js";
import { Sweep } from "./sweep.js";

const POSITIONS = 80; // rows of the map
const MOST_POSITION = 2 ** 31 - 1 - POSITIONS;
const DISTANCES = 160;
const PAUSE = 150; // milliseconds behind the last move of a slider

// Whole numbers from 0 to `most`, closer together where they are small.
function spread(most, count) {
  const found = new Set([0]);
  for (let index = 0; index < count - 1; index += 1) found.add(Math.round(most ** (index / (count - 2))));
  return [...found].sort((a, b) => a - b);
}

export class Rotary extends Component {
  state = { settings: null, picked: startOf("yarn", this.props.scalings.kinds), length: null, first: 0, own: null, scaled: null, error: null, busy: false };

  componentDidMount() {
    this.load();
  }

  load = async () => {
    try {
      const settings = await getJson("v1/rotary");
      const length = Math.min(4 * settings.model.original_max_position_embeddings, 2 ** 31 - 1);
      this.setState({ settings, length }, this.ask);
    } catch (error) {
      this.fail(error);
    }
  };

  componentWillUnmount() {
    clearTimeout(this.timer);
    this.running?.abort();
  }

  fail(error) {
    if (error.name === "AbortError") return;
    this.setState({ error: error.message, busy: false });
    if (error instanceof ApiError && error.status === 401) this.props.onLocked();
  }

  change = (more) => {
    this.setState({ ...more, busy: true });
    clearTimeout(this.timer);
    this.timer = setTimeout(this.ask, PAUSE);
  };

  ask = async () => {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { picked, length, first } = this.state;
    try {
      const places = { positions: [...Array(POSITIONS).keys()].map((row) => first + row), distances: spread(length, DISTANCES) };
      const look = async (field) => {
        const body = { model: this.props.model, length, ...field };
        const [inspected, curves] = await Promise.all([
          postJson("v1/rotary/inspect", body, running.signal),
          postJson("v1/rotary/curves", { ...body, ...places }, running.signal),
        ]);
        return { ...inspected, curves };
      };
      const [own, scaled] = await Promise.all([look({}), look(fieldOf(picked))]);
      this.setState({ own, scaled, error: null, busy: false });
    } catch (error) {
      this.fail(error);
    }
  };

  render({ model, longest, scalings, onCompare, onLocked }, { settings, picked, length, own, scaled, error, busy }) {
    if (!settings) return html`<main class="room">${error ? html`<p class="error" role="alert">${error} <button type="button" onClick=${this.load}>Try again</button></p>` : html`<p class="note">Waiting for the server…</p>`}</main>`;
    const trained = settings.model.original_max_position_embeddings;
    return html`<main class="room wide">
      <p class="note">How the model encodes positions, and what a rotary scaling changes: in numbers, in charts, and measured on a text of yours.</p>
      <section class="panel controls" aria-label="Scaling and length">
        <${ScalingPicker} label="Scaling" value=${picked} scalings=${scalings} onChange=${(value) => this.change({ picked: value })} />
        <label class="narrow">Length of the request, in tokens
          <input type="number" min="1" max=${2 ** 31 - 1} value=${length} onInput=${(event) => {
            const wanted = Number(event.currentTarget.value);
            if (Number.isInteger(wanted) && wanted >= 1) this.change({ length: Math.min(wanted, 2 ** 31 - 1) });
          }} /></label>
        <p class="note">It matters to kinds whose frequencies depend on the length, and is the end of the charts.</p>
        ${error && html`<p class="error" role="alert">${error}</p>`}
      </section>
      ${scaled && html`<div class="stack" aria-busy=${String(busy)}>
        ${this.facts(trained, own, scaled)}
        ${this.paste(picked, onCompare)}
        ${this.wavelengths(trained, own, scaled, picked)}
        ${this.turning(scaled)}
        <${Lines} title="The most that a score can be, by distance (RoFormer's bound)" xTitle="distance in tokens" yTitle="over its value at 0" logX
          marks=${[{ at: trained, name: "trained length" }]}
          series=${[curve("the server's own", own, "decay_bound"), curve(nameOf(picked), scaled, "decay_bound")]} />
        <${Lines} title="Score of two equal vectors, by distance" xTitle="distance in tokens" yTitle="mean cosine" logX
          marks=${[{ at: trained, name: "trained length" }]}
          series=${[curve("the server's own", own, "mean_cosine"), curve(nameOf(picked), scaled, "mean_cosine")]} />
        ${this.table(own, scaled, length)}
        <${Sweep} model=${model} picked=${picked} scalings=${scalings} longest=${longest} trained=${trained} onLocked=${onLocked} />
      </div>`}
    </main>`;
  }

  facts(trained, own, scaled) {
    const pairs = scaled.inv_freq.length;
    const share = (look) => `${look.curves.slow_pairs} of ${pairs} (${((100 * look.curves.slow_pairs) / pairs).toFixed(0)} %)`;
    const rows = [
      ["Trained for", `${trained.toLocaleString("en")} tokens`],
      ["Rotated dimensions", `${scaled.curves.rotary_dim}, in ${pairs} pairs`],
      ["Pairs that turn less than once in it", share(scaled)],
      ["The same without this scaling", share(own)],
      ["Attention factor", exact(scaled.attention_factor)],
      ["Frequencies formed for", scaled.effective_length ? `${short(scaled.effective_length)} tokens` : "any length"],
    ];
    return html`<section class="panel" aria-labelledby="rotation"><h2 id="rotation">${scaled.rope_type}</h2>
      <dl class="figures">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
      <p class="fingerprint">Fingerprint <code>${scaled.fingerprint}</code></p></section>`;
  }

  paste(picked, onCompare) {
    let written;
    try {
      written = valueOf(picked);
    } catch {
      return null;
    }
    if (written === undefined || picked.kind.startsWith("profile:")) return null;
    const json = writtenOf(picked);
    const copy = (text) => (event) => copyText(text, event.currentTarget);
    return html`<section class="panel" aria-labelledby="paste"><h2 id="paste">To paste</h2>
      <pre class="json" tabindex="0" aria-label="JSON">${json}</pre>
      <div class="tools">
        <button type="button" onClick=${copy(json)}>Copy the JSON</button>
        <button type="button" onClick=${copy(`windlass serve --rope-scaling '${json}'`)}>Copy as an option of the server</button>
        <button type="button" class="primary" onClick=${() => onCompare(picked)}>Compare in the chat</button>
      </div></section>`;
  }

  wavelengths(trained, own, scaled, picked) {
    const line = (name, look) => ({ name, x: look.wavelengths.map((_, pair) => pair), y: look.wavelengths });
    const beyond = scaled.wavelengths.filter((wavelength) => wavelength === null || wavelength > trained).length;
    return html`<${Lines} title=${`Tokens per turn of each pair: ${beyond} of ${scaled.wavelengths.length} need more than the trained length`}
      xTitle="pair" yTitle="tokens per turn" logY points
      series=${[line("the server's own", own), line(nameOf(picked), scaled), { name: "trained length", x: [0, own.wavelengths.length - 1], y: [trained, trained], dashed: true }]} />`;
  }

  turning(scaled) {
    const { positions, cos, sin } = scaled.curves;
    const describe = (row, pair) => `position ${positions[row]}, pair ${pair}: cos ${cos[row][pair]?.toFixed(6)}, sin ${sin[row][pair]?.toFixed(6)}`;
    const range = `${positions[0].toLocaleString("en")} to ${positions.at(-1).toLocaleString("en")}`;
    const map = (name, rows) => html`<${HeatMap} title=${`${name} at positions ${range}`} xTitle="pair, quick ones left" yTitle="position" rows=${rows} signed describe=${describe} />`;
    return html`<section class="panel" aria-labelledby="maps"><h2 id="maps">Cosines and sines</h2>
      <label class="narrow">First position of the maps
        <input type="number" min="0" max=${MOST_POSITION} value=${this.state.first} onInput=${(event) => {
          const wanted = Number(event.currentTarget.value);
          if (Number.isInteger(wanted) && wanted >= 0) this.change({ first: Math.min(wanted, MOST_POSITION) });
        }} /></label>
      <div class="pair">${map("Cosine", cos)}${map("Sine", sin)}</div>
    </section>`;
  }

  table(own, scaled, length) {
    return html`<details class="numbers panel"><summary>Every pair as numbers</summary>
      <div class="scroll" tabindex="0" role="group" aria-label="Pairs"><table class="pairs">
        <thead><tr>${["Pair", "inv_freq", "Tokens per turn", "without it", "Slower by", `Turns in ${length.toLocaleString("en")}`].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>${scaled.inv_freq.map((frequency, pair) => html`<tr><th scope="row">${pair}</th><td>${exact(frequency)}</td>
          <td>${exact(scaled.wavelengths[pair])}</td><td>${exact(own.wavelengths[pair])}</td>
          <td>${frequency ? `${short(own.inv_freq[pair] / frequency)} ×` : "never turns"}</td>
          <td>${scaled.wavelengths[pair] ? short(length / scaled.wavelengths[pair]) : "0"}</td></tr>`)}</tbody>
      </table></div></details>`;
  }
}

// A curve by distance, without distance 0, which a logarithmic axis does not have.
const curve = (name, look, field) => ({ name, x: look.curves.distances.slice(1), y: look.curves[field].slice(1) });
