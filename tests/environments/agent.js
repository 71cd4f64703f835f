// An agent for the tests in another language: one chat, and the length of the answer as the reward.
async function main() {
  let input = "";
  for await (const chunk of process.stdin) input += chunk;
  const response = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY },
    body: JSON.stringify({
      model: process.env.OPENAI_MODEL,
      messages: [{ role: "user", content: JSON.parse(input).text }],
    }),
  });
  const answer = (await response.json()).choices[0].message.content;
  console.log(JSON.stringify({ reward: answer.length, logged: { text: answer } }));
}
main();
