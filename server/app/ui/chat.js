// The chat tab: one or two columns, and the input field, which sends to all of them.
import { Column } from "./column.js";
import { Component, createRef, html } from "./html.js";
import { EMPTY, Settings, starting } from "./settings.js";

export class Chat extends Component {
  state = { settings: { ...EMPTY, ...starting(this.props.facts) }, compared: false, busy: new Set(), text: "" };
  columns = [createRef(), createRef()];
  area = createRef();

  componentDidMount() {
    this.props.slot.current = this;
    if (this.props.shown) this.area.current.focus();
  }

  componentWillUnmount() {
    this.props.slot.current = null;
  }

  // Compare this scaling with the server's own.
  propose(written) {
    this.setState({ compared: true }, () => this.columns[1].current.setState({ scaling: written }));
    this.area.current.focus();
  }

  shownColumns = () => this.columns.map((column) => column.current).filter(Boolean);

  ask = (event) => {
    event?.preventDefault();
    const text = this.state.text.trim();
    if (!text || this.state.busy.size) return;
    this.setState({ text: "" });
    for (const column of this.shownColumns()) column.ask(text);
  };

  stop = () => this.shownColumns().forEach((column) => column.stop());

  clear = () => {
    this.shownColumns().forEach((column) => column.clear());
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

  render({ model, facts, onLocked }, { settings, compared, busy, text }) {
    const running = busy.size > 0;
    return html`<main class="chat">
      <div class="tools top">
        <button type="button" aria-pressed=${String(compared)} onClick=${this.compare}>Compare</button>
        <button type="button" onClick=${this.clear} disabled=${running}>New chat</button>
      </div>
      <div class=${compared ? "columns two" : "columns"}>
        ${(compared ? ["Left", "Right"] : ["Chat"]).map(
          (name, index) => html`<${Column} key=${index} slot=${this.columns[index]} name=${name} compared=${compared} model=${model}
            settings=${settings} onBusy=${this.busy} onLocked=${onLocked} />`,
        )}
      </div>
      <${Settings} values=${settings} recommended=${facts.recommended_sampling} onChange=${(values) => this.setState({ settings: values })} />
      <form class="composer" onSubmit=${this.ask}>
        <textarea ref=${this.area} rows="2" aria-label="Message" placeholder="Ask something" value=${text} onKeyDown=${this.keys}
          onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea>
        ${running
          ? html`<button type="button" class="primary" onClick=${this.stop}>Stop</button>`
          : html`<button class="primary" disabled=${!text.trim()}>Send</button>`}
      </form>
      <p class="note keys">Enter sends, Shift+Enter begins a line, Escape stops.</p>
    </main>`;
  }
}
