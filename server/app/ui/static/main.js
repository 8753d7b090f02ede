// The page: its head, one column or two, and the field to write in, which asks all of them.
import { getJson, hasKey, keepKey } from "./api.js";
import { Column } from "./column.js";
import { Component, createRef, html, render } from "./html.js";
import { EMPTY, Settings } from "./settings.js";

class Page extends Component {
  state = { model: null, locked: false, wrong: false, trouble: null, settings: EMPTY, compared: false, busy: new Set(), text: "" };
  columns = [createRef(), createRef()];
  area = createRef();

  componentDidMount() {
    this.load();
  }

  async load() {
    try {
      const { data } = await getJson("v1/models");
      this.setState({ model: data[0], locked: false, wrong: false, trouble: null });
      this.area.current?.focus();
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

  shown = () => this.columns.map((column) => column.current).filter(Boolean);

  ask = (event) => {
    event?.preventDefault();
    const text = this.state.text.trim();
    if (!text || this.state.busy.size) return;
    this.setState({ text: "" });
    for (const column of this.shown()) column.ask(text);
  };

  stop = () => this.shown().forEach((column) => column.stop());

  clear = () => {
    this.shown().forEach((column) => column.clear());
    this.area.current.focus();
  };

  compare = () => {
    this.setState(({ compared }) => ({ compared: !compared, busy: new Set() }));
    this.stop();
  };

  busy = (column, on) =>
    this.setState(({ busy }) => {
      const next = new Set(busy);
      next[on ? "add" : "delete"](column);
      return { busy: next };
    });

  keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.ask(event);
    if (event.key === "Escape") this.stop();
  };

  render(_, { model, locked, trouble, settings, compared, busy, text }) {
    const running = busy.size > 0;
    return html`
      <header>
        <h1>Windlass</h1>
        ${model && html`<p class="model"><strong>${model.id}</strong> <span>${model.max_model_len?.toLocaleString("en")} tokens of context</span></p>`}
        ${model && html`<nav>
          <button type="button" aria-pressed=${String(compared)} onClick=${this.compare}>Compare</button>
          <button type="button" onClick=${this.clear} disabled=${running}>New chat</button>
          <a href="docs">API</a>
        </nav>`}
      </header>
      ${trouble && html`<p class="error banner" role="alert">${trouble} <button type="button" onClick=${() => this.load()}>Try again</button></p>`}
      ${locked ? this.door() : model && html`<main>
        <div class=${compared ? "columns two" : "columns"}>
          ${(compared ? ["Left", "Right"] : ["Chat"]).map(
            (name, index) => html`<${Column} key=${index} slot=${this.columns[index]} name=${name} compared=${compared} model=${model.id}
              settings=${settings} onBusy=${this.busy} onLocked=${this.lock} />`,
          )}
        </div>
        <${Settings} values=${settings} onChange=${(values) => this.setState({ settings: values })} />
        <form class="composer" onSubmit=${this.ask}>
          <textarea ref=${this.area} rows="2" aria-label="Message" placeholder="Ask something" value=${text} onKeyDown=${this.keys}
            onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea>
          ${running
            ? html`<button type="button" class="primary" onClick=${this.stop}>Stop</button>`
            : html`<button class="primary" disabled=${!text.trim()}>Send</button>`}
        </form>
        <p class="note keys">Enter sends, Shift+Enter begins a line, Escape stops.</p>
      </main>`}`;
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
