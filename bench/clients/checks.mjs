// What openai-node is asked to do with a running server: node checks.mjs URL MODEL
import assert from "node:assert";
import { createRequire } from "node:module";
import path from "node:path";

// Installed in .clients, not beside this file.
const require = createRequire(path.join(process.env.CLIENTS_NODE ?? process.cwd(), "x.js"));
const { OpenAI, NotFoundError } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 1 });
const messages = [{ role: "user", content: "Say something." }];
const asked = { model, messages, max_tokens: 32, temperature: 0 };

const whole = await client.chat.completions.create(asked);
assert.ok(whole.choices[0].message.content);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

const parameters = {
  type: "object",
  properties: { place: { type: "string", maxLength: 30 } },
  required: ["place"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "look", parameters } }];
const called = client.chat.completions.stream({
  ...asked, max_tokens: 400, tools, tool_choice: "required",
});
const call = (await called.finalChatCompletion()).choices[0].message.tool_calls[0];
assert.equal(call.function.name, "look");
assert.ok("place" in JSON.parse(call.function.arguments));

const response = await client.responses.create({ model, input: "Say something." , max_output_tokens: 32 });
assert.ok(response.output_text);
let streamed = "";
for await (const event of client.responses.stream({ model, input: "Hi.", max_output_tokens: 32 })) {
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
assert.ok(streamed);

await assert.rejects(client.chat.completions.create({ ...asked, model: "no-such-model" }), NotFoundError);
console.log("ok");
