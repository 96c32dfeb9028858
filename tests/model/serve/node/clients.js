// Ask a server with clients of Node: node clients.js URL MODEL plain|turns|tools|required|structured
// Prints an object: of each client what came, whole and streamed.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, what] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: "none" };
const messages = [{ role: "user", content: "Is it wet in Ur?" }];
const City = z.object({ city: z.enum(["Ur", "Uruk"]) });
const found = {};

async function openai(asked) {
  const client = new OpenAI(given);
  const whole = await client.chat.completions.create({ model, messages, ...asked });
  const stream = client.chat.completions.stream({ model, messages, ...asked });
  return [whole.choices[0].message, (await stream.finalChatCompletion()).choices[0].message];
}

async function responses(asked) {
  const client = new OpenAI(given);
  const whole = await client.responses.parse({ model, input: messages, ...asked });
  const stream = client.responses.stream({ model, input: messages, ...asked });
  return [whole, await stream.finalResponse()];
}

async function vercel(of, asked) {
  const whole = await generateText({ model: of, messages, maxRetries: 0, ...asked });
  const stream = streamText({ model: of, messages, maxRetries: 0, ...asked });
  await stream.consumeStream({ onError: (error) => { throw error; } });
  return [whole, stream];
}

const provider = createOpenAI(given);
const compatible = createOpenAICompatible({ ...given, name: "urdir", supportsStructuredOutputs: true });
const models = {
  "ai chat": provider.chat(model),
  "ai responses": provider.responses(model),
  "ai compatible": compatible.chatModel(model),
};

if (what === "plain") {
  found.openai = (await openai({})).map((each) => each.content);
  found.responses = (await responses({})).map((each) => each.output_text);
  for (const [name, of] of Object.entries(models)) {
    const [whole, stream] = await vercel(of, {});
    found[name] = [whole.text, await stream.text];
  }
} else if (what === "turns") {
  for (const [name, of] of Object.entries(models)) {
    const [first] = await vercel(of, {});
    const more = [...messages, ...first.response.messages, ...messages];
    const [whole, stream] = await vercel(of, { messages: more });
    found[name] = [whole.text, await stream.text];
  }
} else if (what === "tools" || what === "required") {
  const choice = what === "tools" ? "auto" : "required";
  const parameters = z.toJSONSchema(City);
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  found.openai = (await openai({ tools, tool_choice: choice })).map(
    (each) => each.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]));
  const flat = [{ type: "function", name: "weather", parameters, strict: true }];
  found.responses = (await responses({ tools: flat, tool_choice: choice })).map(
    (each) => each.output.filter((item) => item.type === "function_call")
      .map((call) => [call.name, JSON.parse(call.arguments)]));
  for (const [name, of] of Object.entries(models)) {
    const asked = { tools: { weather: tool({ inputSchema: City }) }, toolChoice: choice };
    const [whole, stream] = await vercel(of, asked);
    found[name] = [whole.toolCalls, await stream.toolCalls].map(
      (calls) => calls.map((call) => [call.toolName, call.input]));
  }
} else {
  const format = zodResponseFormat(City, "city");
  found.openai = (await openai({ response_format: format })).map((each) => JSON.parse(each.content));
  const text = { format: zodTextFormat(City, "city") };
  found.responses = (await responses({ text })).map((each) => each.output_parsed);
  for (const [name, of] of Object.entries(models)) {
    const [whole, stream] = await vercel(of, { output: Output.object({ schema: City }) });
    found[name] = [whole.output, await stream.output];
  }
}
console.log(JSON.stringify(found));
