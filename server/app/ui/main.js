// The page: its header, the form that asks for a key, and the tabs. A tab preserves its state while another is shown.
import { getJson, hasKey, keepKey } from "./api.js";
import { Attention } from "./attention.js";
import { Cache } from "./cache.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { Component, createRef, html, render } from "./html.js";
import { Rotary } from "./rotary.js";
import { starting } from "./settings.js";

const ROOMS = { chat: ["Chat", Chat], completion: ["Completion", Completion], rotary: ["Rotary", Rotary], attention: ["Attention", Attention], cache: ["Cache", Cache] };
const roomOf = (hash) => (Object.hasOwn(ROOMS, hash.slice(1)) ? hash.slice(1) : "chat");

const NO_ROTATION = { kinds: {}, profiles: {}, policy: "off" }; // of a model without rotary attention

class Page extends Component {
  state = { models: null, scalings: null, locked: false, wrong: false, trouble: null, room: roomOf(location.hash), visited: new Set([roomOf(location.hash)]) };
  chat = createRef();

  componentDidMount() {
    addEventListener("hashchange", () => {
      const room = roomOf(location.hash);
      this.setState(({ visited }) => ({ room, visited: new Set([...visited, room]) }));
    });
    this.load();
  }

  async load() {
    try {
      const { data } = await getJson("v1/models");
      const rotary = await getJson("v1/rotary").catch(() => NO_ROTATION);
      const scalings = { kinds: rotary.kinds, profiles: Object.keys(rotary.profiles), policy: rotary.policy };
      this.setState({ models: data, scalings, locked: false, wrong: false, trouble: null });
    } catch (error) {
      if (error.status === 401) this.lock();
      else this.setState({ trouble: error.message });
    }
  }

  lock = () => {
    this.setState({ locked: true, wrong: hasKey() });
    keepKey("");
  };

  unlock = (event) => {
    event.preventDefault();
    keepKey(new FormData(event.currentTarget).get("key").trim());
    this.load();
  };

  // Show a scaling next to the server's own in the chat.
  compare = (picked) => {
    location.hash = "chat";
    this.setState(({ visited }) => ({ room: "chat", visited: new Set([...visited, "chat"]) }), () => this.chat.current.propose(picked));
  };

  render(_, { models, scalings, locked, trouble, room, visited }) {
    const model = models?.[0];
    return html`
      <header>
        <h1>Windlass</h1>
        ${model && html`<p class="model"><strong>${model.id}</strong> <span>${model.max_model_len?.toLocaleString("en")} tokens of context</span></p>`}
        ${model && !locked && html`<nav aria-label="Rooms">
          ${Object.entries(ROOMS).map(([name, [title]]) => html`<a href=${`#${name}`} aria-current=${name === room ? "page" : undefined}>${title}</a>`)}
          <a href="docs">API</a>
        </nav>`}
      </header>
      ${trouble && html`<p class="error banner" role="alert">${trouble} <button type="button" onClick=${() => this.load()}>Try again</button></p>`}
      ${locked ? this.door() : model && Object.entries(ROOMS).map(([name, [, Room]]) => visited.has(name) && html`<div class="floor" key=${name} hidden=${name !== room}>
        <${Room} slot=${name === "chat" ? this.chat : undefined} shown=${name === room} model=${model.id} models=${models} starting=${starting(model)}
          longest=${model.max_model_len} attentionMaps=${model.attention_maps} scalings=${scalings} onCompare=${this.compare} onLocked=${this.lock} />
      </div>`)}`;
  }

  door() {
    return html`<main class="door"><form onSubmit=${this.unlock}>
      <h2>This server asks for a key</h2>
      <label>API key <input type="password" name="key" required autocomplete="off" ref=${(input) => input?.focus()} /></label>
      ${this.state.wrong && html`<p class="error" role="alert">The server does not take this key.</p>`}
      <button class="primary">Open</button>
      <p class="note">It is stored in this tab until you close it. Conversations are stored in this browser.</p>
    </form></main>`;
  }
}

const place = document.getElementById("page");
place.replaceChildren(); // the text of a page that is loading
render(html`<${Page} />`, place);
