// The first token at which two answers differ.
import { postJson } from "./api.js";

const commonLength = (a, b) => {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length += 1;
  return length;
};

// A `differs` for each answer: its place and length in the text, and the number and text of the token. Null if there is no difference.
// answers: [{content, ids}, {content, ids}].
export async function firstDifference(model, answers) {
  const [left, right] = answers.map(({ ids }) => ids);
  const index = commonLength(left, right);
  if (index === left.length && index === right.length) return null;
  const common = commonLength(...answers.map(({ content }) => content));
  return Promise.all(answers.map(async ({ ids, content }) => {
    const tokens = ids.slice(0, index + 1);
    const texts = tokens.length ? (await postJson("detokenize", { model, tokens, return_token_strs: true, return_offsets: false })).token_strs : [];
    const before = texts.slice(0, index).join("");
    const token = index < ids.length ? texts[index] : "";
    // Thinking, or a character of several tokens: the texts of the tokens are not those of the answer.
    const at = content.startsWith(before + token) ? before.length : common;
    const found = content.startsWith(token, at) && token.trim() !== "";
    const space = found ? token.length - token.trimStart().length : 0;
    return { at: at + space, length: found ? token.length - space : 1, number: index + 1, token: token.trim() || token };
  }));
}
