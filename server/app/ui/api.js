// Speaks to the server that this page came from. The key lives in this tab only.
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

// The message of an error. The page cannot set the options of the server that some name.
export function advised(message) {
  const option = /(?:^|[\s(`])(--[a-z][a-z-]*)/.exec(message)?.[1];
  return option ? `${message} (${option} is an option of the server: only its operator can set it, at the next start.)` : message;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(url(path), { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, advised(body?.error?.message ?? `the server answered ${response.status}`));
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
      const { value, done } = await reader.read();
      if (done) throw new Error("the connection ended before the answer did");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue; // empty lines, and comments that keep the connection
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(200, advised(chunk.error.message));
        yield chunk;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
