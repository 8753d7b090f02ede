// The chat: a conversation in one column or two, and the field to write in, which asks all of them.
import { readTextFile, withFiles } from "./attachments.js";
import { Column } from "./column.js";
import { ConversationList } from "./conversation_list.js";
import { firstDifference } from "./difference.js";
import { Component, createRef, html } from "./html.js";
import { SERVERS_OWN } from "./scaling.js";
import { EMPTY, Settings, starting } from "./settings.js";
import { actionOf, HelpSheet } from "./shortcuts.js";
import * as store from "./store.js";

const WIDE = "(min-width: 64rem)"; // wide enough for the list next to the chat
const TITLE_LENGTH = 60;
const NEW_TITLE = "New chat";

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";

export class Chat extends Component {
  state = { conversation: store.load(store.openId()) ?? this.fresh(), list: store.list(), listed: matchMedia(WIDE).matches, busy: new Set(), text: "", files: [], problem: null, help: false };
  columns = [createRef(), createRef()];
  area = createRef();
  picker = createRef();

  componentDidMount() {
    this.props.slot.current = this;
    store.setOpenId(this.state.conversation.id);
    addEventListener("pagehide", this.keep);
    addEventListener("storage", this.stored);
    addEventListener("keydown", this.shortcut);
    if (this.props.shown) this.area.current.focus();
  }

  componentWillUnmount() {
    this.keep();
    this.props.slot.current = null;
    removeEventListener("pagehide", this.keep);
    removeEventListener("storage", this.stored);
    removeEventListener("keydown", this.shortcut);
  }

  // A conversation without messages, with the settings of the open one.
  fresh() {
    const { models } = this.props;
    const { model = models[0].id, settings = { ...EMPTY, ...starting(models[0]) } } = this.state?.conversation ?? {};
    return { id: store.newId(), title: NEW_TITLE, changed: Date.now(), model, settings, columns: [{ picked: SERVERS_OWN, messages: [] }] };
  }

  // ---- storage ----
  shownColumns = () => this.columns.map((column) => column.current).filter(Boolean);

  snapshot = () => ({ ...this.state.conversation, columns: this.shownColumns().map((column) => column.snapshot()) });

  keep = () => {
    const conversation = this.snapshot();
    const question = conversation.columns[0].messages.find(({ role }) => role === "user")?.content ?? NEW_TITLE;
    if (!conversation.renamed) conversation.title = question.trim().split("\n")[0].slice(0, TITLE_LENGTH);
    this.attempt(() => store.save(conversation));
    const { title, changed, renamed } = conversation;
    this.setState(({ conversation: shown }) => ({ list: store.list(), conversation: shown.id === conversation.id ? { ...shown, title, changed, renamed } : shown }));
  };

  attempt(action) {
    try {
      action();
      this.setState({ problem: null });
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  stored = ({ key }) => store.isStored(key) && this.setState({ list: store.list() }); // by another tab

  show(conversation) {
    this.stop();
    store.setOpenId(conversation.id);
    this.setState(({ listed }) => ({ conversation, busy: new Set(), files: [], listed: listed && matchMedia(WIDE).matches }), () => this.area.current.focus());
  }

  open = (id) => {
    this.keep();
    const conversation = store.load(id);
    if (conversation) this.show(conversation);
  };

  startNew = () => {
    this.keep();
    this.show(this.fresh());
  };

  rename = (title) => this.change({ title, renamed: true });

  remove = () => {
    const { id } = this.state.conversation;
    this.show(this.fresh());
    store.remove(id);
    this.setState({ list: store.list() });
  };

  export = (kind) => {
    this.keep();
    const conversation = this.snapshot();
    const name = fileName(conversation.title);
    if (kind === "markdown") download(`${name}.md`, "text/markdown", store.toMarkdown(conversation));
    else if (kind === "json") download(`${name}.json`, "application/json", store.toJson([conversation]));
    else download("conversations.json", "application/json", store.toJson(store.list().map(({ id }) => store.load(id))));
  };

  import = async (files) => {
    this.keep();
    try {
      for (const file of files) {
        if (file.size > 2 * store.MOST_CHARACTERS) throw new Error(`${file.name} is larger than what the browser can store.`);
        const found = store.read(file.name, await file.text());
        found.forEach(store.save);
        if (found.length) this.show(found.at(-1));
      }
      this.setState({ list: store.list(), problem: null });
    } catch (error) {
      this.setState({ list: store.list(), problem: error.message });
    }
  };

  // Change the model, the settings or the title.
  change = (more) => this.setState(({ conversation }) => ({ conversation: { ...conversation, ...more } }), this.keep);

  // ---- questions ----
  // Show this scaling next to the server's own.
  propose(picked) {
    const done = () => {
      this.columns[1].current.pick(picked);
      this.area.current.focus();
    };
    if (this.state.conversation.columns.length > 1) done();
    else this.compare(done);
  }

  // One seed for both columns, so that they differ by the scaling alone.
  seed() {
    const { seed, temperature } = this.state.conversation.settings;
    const compared = this.shownColumns().length > 1;
    return compared && !seed?.trim() && temperature?.trim() !== "0" ? Math.floor(Math.random() * 2 ** 31) : null;
  }

  // Let each column answer, then mark where the answers differ.
  async each(action) {
    const columns = this.shownColumns();
    const seed = this.seed();
    this.setState(({ conversation }) => ({ conversation: { ...conversation, changed: Date.now() } }));
    const answers = await Promise.all(columns.map((column) => action(column, seed)));
    const finished = answers.every((answer) => answer && !answer.error && answer.facts.ended !== "stopped");
    if (columns.length > 1 && finished && this.shownColumns().every((column, index) => column === columns[index])) {
      const found = await firstDifference(this.model().id, answers).catch(() => null);
      if (found) await Promise.all(columns.map((column, index) => column.mark(found[index])));
    }
    if (this.shownColumns()[0] === columns[0]) this.keep();
  }

  ask = (event) => {
    event?.preventDefault();
    const text = withFiles(this.state.files, this.state.text.trim());
    if (!text || this.state.busy.size) return;
    this.setState({ text: "", files: [] });
    this.each((column, seed) => column.ask(text, seed));
  };

  edit = (index, text) => this.each((column, seed) => (column.state.messages[index]?.role === "user" ? column.edit(index, text, seed) : undefined));
  retry = () => !this.state.busy.size && this.each((column, seed) => (column.state.messages.length ? column.retry(seed) : undefined));

  continue = async (column) => {
    await column.continue();
    if (this.shownColumns().includes(column)) this.keep();
  };

  stop = () => this.shownColumns().forEach((column) => column.stop());

  // A second column begins with the history of the first.
  compare = (done) => {
    this.stop();
    const [left] = this.snapshot().columns;
    const { columns } = this.state.conversation;
    const right = { picked: SERVERS_OWN, messages: left.messages };
    this.setState(({ conversation }) => ({ busy: new Set(), conversation: { ...conversation, columns: columns.length > 1 ? [left] : [left, right] } }), () => {
      this.keep();
      if (typeof done === "function") done();
    });
  };

  busy = (column, on) =>
    this.setState(({ busy }) => {
      const next = new Set(busy);
      next[on ? "add" : "delete"](column);
      return { busy: next };
    }, on ? this.keep : undefined);

  attach = async (files) => {
    for (const file of files) {
      try {
        const read = await readTextFile(file);
        this.setState(({ files: before }) => ({ files: [...before, read], problem: null }));
      } catch (error) {
        this.setState({ problem: error.message });
      }
    }
  };

  drop = (event) => {
    event.preventDefault();
    this.attach([...event.dataTransfer.files]);
  };

  // ---- keys ----
  keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.ask(event);
    if (event.key === "Escape" && !this.state.busy.size) event.currentTarget.blur();
  };

  shortcut = (event) => {
    if (!this.props.shown || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return this.stop();
    const last = () => [...document.querySelectorAll(".column:first-child .edit")].at(-1)?.click();
    const details = document.querySelector(".chat .settings");
    const action = {
      focus: () => this.area.current.focus(),
      new: this.startNew,
      list: this.toggleList,
      compare: this.compare,
      retry: this.retry,
      edit: last,
      settings: () => (details.open = !details.open),
      help: () => this.setState({ help: true }),
    }[actionOf(event)];
    if (!action) return;
    event.preventDefault();
    action();
  };

  toggleList = () => this.setState(({ listed }) => ({ listed: !listed }));

  model = () => this.props.models.find(({ id }) => id === this.state.conversation.model) ?? this.props.models[0];

  render({ models, scalings, onLocked }, { conversation, list, listed, busy, text, files, problem, help }) {
    const running = busy.size > 0;
    const { id, columns, settings } = conversation;
    const compared = columns.length > 1;
    const model = this.model();
    return html`<main class=${listed ? "chat with-list" : "chat"}>
      ${listed && html`<${ConversationList} list=${list} conversation=${conversation} onOpen=${this.open} onRename=${this.rename}
        onRemove=${this.remove} onExport=${this.export} onImport=${this.import} />`}
      <div class="talk">
        <div class="tools top">
          <button type="button" aria-expanded=${String(listed)} onClick=${this.toggleList}>Conversations</button>
          ${models.length > 1 && html`<label class="model-choice">Model <select value=${model.id} onChange=${(event) => this.change({ model: event.currentTarget.value })}>
            ${models.map(({ id: name, parent }) => html`<option value=${name}>${parent ? `${name} (adapter)` : name}</option>`)}</select></label>`}
          <span class="filler"></span>
          <button type="button" aria-pressed=${String(compared)} onClick=${this.compare}>Compare</button>
          <button type="button" onClick=${this.startNew}>New chat</button>
          <button type="button" aria-label="Keyboard shortcuts" onClick=${() => this.setState({ help: true })}>?</button>
        </div>
        ${problem && html`<p class="error" role="alert">${problem}</p>`}
        <div class=${compared ? "columns two" : "columns"} key=${id}>
          ${columns.map((column, index) => html`<${Column} key=${index} slot=${this.columns[index]} name=${compared ? ["Left", "Right"][index] : "Chat"} compared=${compared}
            initial=${column} model=${model} settings=${settings} scalings=${scalings} onBusy=${this.busy} onChange=${this.keep} onEdit=${this.edit} onRetry=${this.retry}
            onContinue=${this.continue} onLocked=${onLocked} />`)}
        </div>
        <${Settings} values=${settings} model=${model} onChange=${(values) => this.change({ settings: values })} />
        ${files.length > 0 && html`<ul class="files" aria-label="Attached files">${files.map((file, index) => html`<li>${file.name}
          <button type="button" class="quiet" aria-label=${`Remove ${file.name}`} onClick=${() => this.setState({ files: files.filter((_, at) => at !== index) })}>×</button></li>`)}</ul>`}
        <form class="composer" onSubmit=${this.ask} onDragOver=${(event) => event.preventDefault()} onDrop=${this.drop}>
          <button type="button" onClick=${() => this.picker.current.click()}>Attach</button>
          <input type="file" multiple hidden ref=${this.picker} aria-label="Text files" onChange=${(event) => {
            this.attach([...event.currentTarget.files]);
            event.currentTarget.value = "";
          }} />
          <textarea ref=${this.area} rows="2" aria-label="Message" placeholder="Ask something" value=${text} onKeyDown=${this.keys}
            onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea>
          ${running
            ? html`<button type="button" class="primary" onClick=${this.stop}>Stop</button>`
            : html`<button class="primary" disabled=${!text.trim() && !files.length}>Send</button>`}
        </form>
        <p class="note keys">Enter sends, Shift+Enter begins a line, Escape stops, ? lists the shortcuts. Conversations are stored in this browser.</p>
      </div>
      ${help && html`<${HelpSheet} onClose=${() => this.setState({ help: false })} />`}
    </main>`;
  }
}
