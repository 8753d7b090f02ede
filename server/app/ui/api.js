// Speaks to the server that this page came from. The key lives in this tab only.
import { labelled } from "./settings.js";

const ROOT = new URL("../", import.meta.url); // the page may have a proxy's path before its own
const KEY = "windlass-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const url = (path) => new URL(path, ROOT).href;
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

const CUT = "The connection ended before the answer did.";
const UNREACHABLE = "The server does not answer: it has stopped, or the connection is lost. Try again when it runs.";
const LONG_PROMPT = {
  "v1/chat/completions": "start a new chat, edit an earlier message, or let the oldest turns be dropped under Settings, When the context is full",
  other: "shorten the text",
};

// The message of an error, with the form's labels for fields of the API and advice that a user of the page can follow:
// options of the server are its operator's.
export function advised({ message, code }, path) {
  if (code === "context_length_exceeded" && message.includes("truncate_prompt_tokens")) {
    return `${message.slice(0, message.indexOf(": "))}: ${LONG_PROMPT[path] ?? LONG_PROMPT.other}`;
  }
  const own = labelled(message.replace(/ \([^()]*--[a-z][^()]*\)/g, ""));
  const option = /(?:^|[\s(`])(--[a-z][a-z-]*)/.exec(own)?.[1];
  return option ? `${own} (${option} is an option of the server: only its operator can set it, at the next start.)` : own;
}

// An interrupted connection as an error that names it; browsers only report "Failed to fetch" or "network error".
async function connected(promise, message) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, message);
  }
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await connected(fetch(url(path), { ...options, headers }), UNREACHABLE);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, advised(body?.error ?? { message: `the server answered ${response.status}` }, path));
}

export async function getJson(path) {
  return (await call(path)).json();
}

export async function postJson(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return (await call(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

// Yields the chunks of a stream of server-sent events. Leaving the loop early, or `signal`, ends the request.
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await connected(reader.read(), CUT);
      if (done) throw new ApiError(0, CUT);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue; // empty lines, and comments that keep the connection
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(200, advised(chunk.error, path));
        yield chunk;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
