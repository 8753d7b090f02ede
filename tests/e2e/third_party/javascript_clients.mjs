// Structured answers and calls of tools through other people's JavaScript clients, each against a running server.
//
//     node javascript_clients.mjs http://127.0.0.1:8000/v1 MODEL
//
// Runs in a folder whose node_modules hold the packages; prints a line for each check and ends with 1 where one fails.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, model] = process.argv.slice(2);
const here = createRequire(pathToFileURL(process.cwd() + "/"));
const load = (name) => import(pathToFileURL(here.resolve(name)));
const { default: OpenAI } = await load("openai");
const { zodResponseFormat } = await load("openai/helpers/zod");
const { generateText, streamText, Output, tool, jsonSchema } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const question = "What is the weather in Rome?";
const cities = ["Rome", "Paris", "Oslo"];
const weather = z.object({ city: z.enum(cities), sky: z.enum(["sunny", "cloudy"]) });
const parameters = { type: "object", properties: { city: { type: "string", enum: cities } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters } }];
const messages = [{ role: "user", content: question }];
const openai = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "server", baseURL: base, supportsStructuredOutputs: true });
const asked = { model: provider(model), prompt: question, maxOutputTokens: 300, temperature: 0, maxRetries: 0 };
const sdkTools = {
  weather: tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema(parameters),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};

const called = ({ name, arguments: text }) => {
  assert.equal(name, "weather");
  assert.ok(cities.includes(JSON.parse(text).city));
};

const checks = {
  async openai_parse() {
    const response_format = zodResponseFormat(weather, "weather");
    const answer = await openai.chat.completions.parse({ model, messages, max_tokens: 300, temperature: 0, response_format });
    weather.parse(answer.choices[0].message.parsed);
  },
  async openai_parse_streamed() {
    const response_format = zodResponseFormat(weather, "weather");
    const stream = openai.chat.completions.stream({ model, messages, max_tokens: 300, temperature: 0, response_format });
    weather.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
  },
  async openai_tools() {
    const first = await openai.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 300, temperature: 0 });
    const message = first.choices[0].message;
    assert.ok(message.tool_calls.length > 0);
    message.tool_calls.forEach((call) => called(call.function));
    const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
    const second = await openai.chat.completions.create({ model, messages: [...messages, message, ...results], tools, tool_choice: "none", max_tokens: 24 });
    assert.ok(second.choices[0].message.content);
  },
  async openai_tools_streamed() {
    const stream = openai.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 300, temperature: 0 });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    assert.ok(message.tool_calls.length > 0);
    message.tool_calls.forEach((call) => called(call.function));
  },
  async ai_sdk_object() {
    const answer = await generateText({ ...asked, output: Output.object({ schema: weather }) });
    weather.parse(answer.output);
  },
  async ai_sdk_object_streamed() {
    const answer = streamText({ ...asked, output: Output.object({ schema: weather }) });
    weather.parse(await answer.output);
  },
  async ai_sdk_tools() {
    const answer = await generateText({ ...asked, tools: sdkTools, toolChoice: "required" });
    assert.ok(answer.toolResults.length > 0);
    for (const { input, output } of answer.toolResults) assert.equal(output, `sunny in ${input.city}`);
  },
  async ai_sdk_tools_streamed() {
    const answer = streamText({ ...asked, tools: sdkTools, toolChoice: "required" });
    const results = await answer.toolResults;
    assert.ok(results.length > 0);
    for (const { input, output } of results) assert.equal(output, `sunny in ${input.city}`);
  },
};

let failed = 0;
for (const [name, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${error?.name}: ${String(error?.message).replace(/\s+/g, " ").slice(0, 600)}`);
  }
}
process.exit(failed ? 1 : 0);
