// The page: its header, the form that asks for a key, and the tabs. A hidden tab keeps its state.
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

class Page extends Component {
  state = { model: null, profiles: [], locked: false, wrong: false, trouble: null, room: roomOf(location.hash), visited: new Set([roomOf(location.hash)]) };
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
      this.setState({ model: data[0], locked: false, wrong: false, trouble: null });
      const { profiles } = await getJson("v1/rotary").catch(() => ({ profiles: {} }));
      this.setState({ profiles: Object.keys(profiles) });
    } catch (error) {
      if (error.status === 401) this.lock();
      else this.setState({ trouble: `The server cannot be asked: ${error.message}` });
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

  // The chat compares a scaling with the server's own.
  compare = (written) => {
    location.hash = "chat";
    this.setState(({ visited }) => ({ room: "chat", visited: new Set([...visited, "chat"]) }), () => this.chat.current.propose(written));
  };

  render(_, { model, profiles, locked, trouble, room, visited }) {
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
        <${Room} slot=${name === "chat" ? this.chat : undefined} shown=${name === room} model=${model.id} facts=${model} starting=${starting(model)}
          longest=${model.max_model_len} profiles=${profiles} onCompare=${this.compare} onLocked=${this.lock} />
      </div>`)}`;
  }

  door() {
    return html`<main class="door"><form onSubmit=${this.unlock}>
      <h2>This server asks for a key</h2>
      <label>API key <input type="password" name="key" required autocomplete="off" ref=${(input) => input?.focus()} /></label>
      ${this.state.wrong && html`<p class="error" role="alert">The server does not take this key.</p>`}
      <button class="primary">Open</button>
      <p class="note">It is kept in this tab and forgotten when you close it.</p>
    </form></main>`;
  }
}

render(html`<${Page} />`, document.getElementById("page"));
