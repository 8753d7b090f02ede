// Text files that are sent inside a message, each as a fenced block with the file's name.
const MOST_BYTES = 256 * 1024;

// Throws an Error for a file that is too large or no text.
export async function readTextFile(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${Math.ceil(file.size / 1024).toLocaleString("en")} KiB: at most ${MOST_BYTES / 1024} KiB can be attached.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text in UTF-8: only text files can be attached.`);
  return { name: file.name, text };
}

// The message with its files first. A fence is longer than any in the file.
export function withFiles(files, text) {
  const blocks = files.map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`{3,}/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    const extension = /\.(\w{1,10})$/.exec(file.name)?.[1] ?? "text";
    return `${file.name}:\n${fence}${extension}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, text].filter(Boolean).join("\n\n");
}
