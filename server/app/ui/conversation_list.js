// The list of stored conversations: search, open, rename, delete, export and import.
import { Component, createRef, html } from "./html.js";
import { contains } from "./store.js";

const SEARCHED = 6; // conversations from which on there is a search

export class ConversationList extends Component {
  state = { renamed: null, wanted: "" }; // renamed: the new title while it is written
  files = createRef();

  rename = (event) => {
    event.preventDefault();
    const title = this.state.renamed.trim();
    this.setState({ renamed: null });
    if (title) this.props.onRename(title);
  };

  remove = () => {
    if (confirm(`Delete “${this.props.conversation.title}”? This cannot be undone.`)) this.props.onRemove();
  };

  choose = (event) => {
    this.props.onImport([...event.currentTarget.files]);
    event.currentTarget.value = "";
  };

  render({ list, conversation, onOpen, onExport }, { renamed, wanted }) {
    const searched = list.length >= SEARCHED && wanted.trim().toLowerCase();
    const found = searched ? list.filter(({ id }) => contains(id, searched)) : list;
    const stored = list.some(({ id }) => id === conversation.id);
    const button = (name, onClick) => html`<button type="button" class="quiet" onClick=${onClick}>${name}</button>`;
    return html`<aside class="conversations" aria-label="Conversations">
      <div class="tools">
        <button type="button" onClick=${() => this.files.current.click()}>Import</button>
        <button type="button" disabled=${!list.length} onClick=${() => onExport("all")}>Export all</button>
        <input type="file" multiple accept=".json,.md,.markdown" hidden ref=${this.files} onChange=${this.choose} aria-label="Files to import" />
      </div>
      ${stored && renamed === null && html`<div class="tools" role="group" aria-label="The open conversation">
        ${button("Rename", () => this.setState({ renamed: conversation.title }))}
        ${button("Delete", this.remove)}
        ${button("Export JSON", () => onExport("json"))}
        ${button("Export Markdown", () => onExport("markdown"))}
      </div>`}
      ${renamed !== null && html`<form onSubmit=${this.rename}>
        <label>Title <input value=${renamed} maxlength="200" ref=${(input) => input && document.activeElement !== input && input.focus()}
          onInput=${(event) => this.setState({ renamed: event.currentTarget.value })}
          onKeyDown=${(event) => event.key === "Escape" && this.setState({ renamed: null })} /></label>
        <div class="tools"><button class="primary">Save</button>${button("Cancel", () => this.setState({ renamed: null }))}</div>
      </form>`}
      ${list.length >= SEARCHED && html`<input type="search" aria-label="Search conversations" placeholder="Search" value=${wanted}
        onInput=${(event) => this.setState({ wanted: event.currentTarget.value })} />`}
      ${searched && !found.length && html`<p class="note">No conversation contains this text.</p>`}
      ${list.length
        ? html`<ol>${found.map(({ id, title, changed }) => html`<li key=${id}><button type="button" class="conversation" aria-current=${id === conversation.id ? "true" : undefined}
            title=${new Date(changed).toLocaleString()} onClick=${() => onOpen(id)}>${title}</button></li>`)}</ol>`
        : html`<p class="note">Conversations are stored in this browser only, and appear here.</p>`}
    </aside>`;
  }
}
