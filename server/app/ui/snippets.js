// The request that the page sends, as a command or a program to take away. The key is never in it.
const indent = (text, by) => text.replaceAll("\n", `\n${" ".repeat(by)}`);
const quote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// JSON as a Python literal: its strings are valid Python, its names are not.
export function python(value, by = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((item) => python(item, by + 4))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, by + 4)}`);
  if (!parts.length) return open + close;
  const pad = "\n" + " ".repeat(by + 4);
  return `${open}${pad}${parts.join(`,${pad}`)},\n${" ".repeat(by)}${close}`;
}

export function curl(address, body, withKey) {
  const key = withKey ? ` \\\n  -H "Authorization: Bearer $WINDLASS_API_KEY"` : "";
  return `curl ${address} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quote(JSON.stringify(body, null, 2))}\n`;
}

// Fields that OpenAI's client does not know go into extra_body.
const OWN = ["top_k", "min_p", "rope_scaling"];

export function openai(base, body, withKey) {
  const entries = Object.entries(body);
  const known = entries.filter(([name]) => !OWN.includes(name));
  const own = Object.fromEntries(entries.filter(([name]) => OWN.includes(name)));
  if (Object.keys(own).length) known.push(["extra_body", own]);
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 4)},`).join("\n");
  const key = withKey ? 'os.environ["WINDLASS_API_KEY"]' : '"none"';
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})
answer = client.chat.completions.create(
${fields}
)
print(answer.choices[0].message.content)
`;
}

export function httpx(address, body, withKey) {
  const key = withKey ? '\n    headers={"Authorization": "Bearer " + os.environ["WINDLASS_API_KEY"]},' : "";
  return `${withKey ? "import os\n\n" : ""}import httpx

answer = httpx.post(
    ${JSON.stringify(address)},${key}
    json=${indent(python(body), 4)},
    timeout=600,
)
answer.raise_for_status()
print(answer.json()["choices"][0]["message"]["content"])
`;
}
