// Conversations in this browser: one entry of localStorage each, and a limit on all of them together.
import { SETTING_NAMES } from "./settings.js";

const PREFIX = "windlass-chat:";
const OPEN = "windlass-open"; // the conversation of this tab
export const MOST_CHARACTERS = 4_000_000; // browsers allow about 5 million per site
const MOST_MESSAGES = 10_000;
const FORMAT = "windlass-conversations";
const MARK = "<!-- windlass:";

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

// Id, title and time of each conversation, the latest first.
export function list() {
  const found = keys().map((key) => load(key.slice(PREFIX.length))).filter(Boolean);
  return found.map(({ id, title, changed }) => ({ id, title, changed })).sort((a, b) => b.changed - a.changed);
}

// Whether the title or a message of a stored conversation contains a text in lower case.
export function contains(id, wanted) {
  const { title, columns } = load(id) ?? { title: "", columns: [] };
  return [title, ...columns.flatMap(({ messages }) => messages.map(({ content }) => content))].some((text) => text.toLowerCase().includes(wanted));
}

// Null if there is none, or if it cannot be read.
export function load(id) {
  try {
    return checked({ ...JSON.parse(localStorage.getItem(PREFIX + id)), id });
  } catch {
    return null;
  }
}

// Throws an Error if there is no space. A conversation without messages is not stored.
export function save(conversation) {
  if (!conversation.columns.some(({ messages }) => messages.length)) return;
  const key = PREFIX + conversation.id;
  const text = JSON.stringify(conversation);
  const others = keys().reduce((sum, one) => sum + (one === key ? 0 : localStorage.getItem(one).length), 0);
  try {
    if (others + text.length > MOST_CHARACTERS) throw new Error();
    localStorage.setItem(key, text);
  } catch {
    throw new Error("The browser has no more space for conversations: this one is not stored. Export it, or delete others.");
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);
export const isStored = (key) => key === null || key.startsWith(PREFIX); // of a storage event
export const openId = () => sessionStorage.getItem(OPEN);
export const setOpenId = (id) => sessionStorage.setItem(OPEN, id);

const text = (value, most = MOST_CHARACTERS) => (typeof value === "string" ? value.slice(0, most) : "");
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function checkedMessage(value) {
  if (!isObject(value) || !["user", "assistant"].includes(value.role) || typeof value.content !== "string") throw new Error("it has a message without role or content");
  const message = { role: value.role, content: value.content };
  for (const name of ["thinking", "error"]) if (text(value[name])) message[name] = value[name];
  for (const name of ["facts", "differs"]) {
    if (isObject(value[name])) message[name] = Object.fromEntries(Object.entries(value[name]).filter(([, one]) => ["number", "string"].includes(typeof one)));
  }
  return message;
}

function checkedPicked(value) {
  const fields = isObject(value?.fields) ? Object.entries(value.fields).filter(([, one]) => Number.isFinite(one)) : [];
  return { kind: text(value?.kind, 100) || "own", fields: Object.fromEntries(fields), text: text(value?.text) };
}

// A conversation with the known fields only. Throws an Error if it is none.
function checked(value) {
  if (!isObject(value) || !Array.isArray(value.columns) || ![1, 2].includes(value.columns.length)) throw new Error("it has no columns of messages");
  const columns = value.columns.map((column) => {
    if (!Array.isArray(column?.messages) || column.messages.length > MOST_MESSAGES) throw new Error("a column has no list of messages");
    return { picked: checkedPicked(column.picked), messages: column.messages.map(checkedMessage) };
  });
  const settings = isObject(value.settings) ? value.settings : {};
  return {
    id: text(value.id, 100) || newId(),
    title: text(value.title, 200) || "Conversation",
    renamed: value.renamed === true,
    changed: Number.isFinite(value.changed) ? value.changed : Date.now(),
    model: text(value.model, 1000),
    settings: Object.fromEntries(SETTING_NAMES.map((name) => [name, text(settings[name])])),
    columns,
  };
}

export const toJson = (conversations) => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);

// Comments in the Markdown hold what a reader does not need.
export function toMarkdown(conversation) {
  const { columns, title, model, settings } = conversation;
  const facts = JSON.stringify({ title, model, settings, picked: columns.map(({ picked }) => picked) }).replaceAll("--", "-\\u002d");
  const lines = [`${MARK} ${facts} -->`, `# ${title.replaceAll("\n", " ")}`];
  columns.forEach(({ messages }, index) => {
    for (const { role, content } of messages) {
      const name = `${role === "user" ? "User" : "Assistant"}${columns.length > 1 ? `, ${["left", "right"][index]}` : ""}`;
      lines.push(`${MARK} ${index} ${role} -->`, `## ${name}`, "", content.replaceAll(MARK, "<!-- windlass :"), "");
    }
  });
  return lines.join("\n");
}

function fromMarkdown(written) {
  const parts = written.replaceAll("\r\n", "\n").split(/^<!-- windlass: (.*) -->\n/m);
  if (parts.length < 3) throw new Error("it has no comments of an export");
  const { picked, ...facts } = JSON.parse(parts[1]);
  const columns = picked.map((one) => ({ picked: one, messages: [] }));
  for (let index = 3; index < parts.length; index += 2) {
    const [, column, role] = /^([01]) (user|assistant)$/.exec(parts[index]) ?? [];
    // Without the heading, the empty line below it, and the line break and empty line at the end.
    columns[column].messages.push({ role, content: parts[index + 1].replace(/^## .*\n\n/, "").replace(/\n\n?$/, "") });
  }
  return checked({ ...facts, columns });
}

// The conversations of an exported file, with new ids. Throws an Error.
export function read(name, written) {
  try {
    const found = written.startsWith(MARK) ? [fromMarkdown(written)] : JSON.parse(written).conversations.map(checked);
    return found.map((conversation) => ({ ...conversation, id: newId(), renamed: true })); // it retains its title
  } catch (error) {
    throw new Error(`${name} is no export of conversations in JSON or Markdown: ${error.message}`);
  }
}
