// The shop as a command in another language, without a library: quartet train examples/agents/node.yaml
//
// It reads the fields of a row from standard input, and prints the reward.
import { text } from "node:stream/consumers";

const row = JSON.parse(await text(process.stdin));
const { OPENAI_BASE_URL: baseUrl, OPENAI_API_KEY: key, OPENAI_MODEL: model } = process.env;

function schema(name, parameter) {
  const parameters = { type: "object", properties: { [parameter]: { type: "string" } }, required: [parameter] };
  return { type: "function", function: { name, parameters } };
}

const tools = [schema("lookup", "item"), schema("calculate", "expression")];

function call(name, given) {
  if (name === "lookup" && given.item in row.prices) return row.prices[given.item];
  if (name === "calculate" && /^\d{1,3}(\+\d{1,3}){1,4}$/.test(given.expression ?? "")) {
    return given.expression.split("+").reduce((sum, number) => sum + Number(number), 0);
  }
  return null;
}

async function play() {
  const messages = [{ role: "user", content: row.text }];
  for (;;) {
    const response = await fetch(`${baseUrl}/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
      body: JSON.stringify({ model, messages, tools }),
    });
    // A limit of the run, such as that of turns, ends the episode.
    if (response.status === 400) return 0;
    if (!response.ok) throw new Error(`the endpoint answered ${response.status}`);
    const { message } = (await response.json()).choices[0];
    if (!message.tool_calls) return Number(message.content?.trim() === String(row.answer));
    messages.push(message);
    for (const { id, function: called } of message.tool_calls) {
      const result = call(called.name, JSON.parse(called.arguments));
      if (result === null) return 0;
      messages.push({ role: "tool", tool_call_id: id, content: String(result) });
    }
  }
}

console.log(JSON.stringify({ reward: await play() }));
