// Token batches and tensors, and the score of a response.

export class InvalidRequest extends Error {}

// Return the int32 elements of a tensor of one dimension.
function integers(tensor, name) {
  if (tensor?.dtype !== "DATA_TYPE_INT32") throw new InvalidRequest(`${name}: expected dtype int32`);
  if (tensor.shape.length !== 1) throw new InvalidRequest(`${name}: expected one dimension`);
  const count = Number(tensor.shape[0]);
  if (tensor.data.length !== 4 * count) {
    throw new InvalidRequest(`${name}: expected ${4 * count} bytes, got ${tensor.data.length}`);
  }
  // A copy: the bytes of a message may start at any address.
  return new Int32Array(new Uint8Array(tensor.data).buffer);
}

// Return the token ids of each response. Throws InvalidRequest.
export function responsesOf(batch, vocabularySize, maxTokens) {
  const ids = integers(batch?.token_ids, "token_ids");
  const prompts = integers(batch.prompt_lengths, "prompt_lengths");
  const responses = integers(batch.response_lengths, "response_lengths");
  if (prompts.length === 0 || prompts.length !== responses.length) {
    throw new InvalidRequest("token batch: expected at least one sequence, and as many prompts as responses");
  }
  const total = [...prompts, ...responses].reduce((sum, length) => sum + length, 0);
  if (prompts.some((length) => length < 1) || responses.some((length) => length < 1) || total !== ids.length) {
    throw new InvalidRequest("token batch: expected lengths of 1 or more whose sum is the number of token ids");
  }
  if (ids.some((id) => id < 0 || id >= vocabularySize)) {
    throw new InvalidRequest(`token_ids: expected ids in 0..${vocabularySize - 1}`);
  }
  let start = 0;
  return Array.from(prompts, (prompt, index) => {
    const end = start + prompt + responses[index];
    if (end - start > maxTokens) throw new InvalidRequest(`a sequence has over ${maxTokens} tokens`);
    const response = ids.slice(start + prompt, end);
    start = end;
    return response;
  });
}

// Return scores as a float32 tensor.
export function tensorOf(scores) {
  const values = Float32Array.from(scores);
  return { dtype: "DATA_TYPE_FLOAT32", shape: [values.length], data: Buffer.from(values.buffer) };
}

// Return the wanted words of each sequence as a set: those of the field "words" of its prompt, or the usual ones without it. A
// sequence whose field is no text with a word has null: it cannot be scored. Throws InvalidRequest.
export function wordsOf(fields, count, usual) {
  if (fields.length === 0) return Array(count).fill(usual);
  if (fields.length !== count) throw new InvalidRequest(`fields: expected none, or ${count}, one for each sequence`);
  return fields.map((text, index) => {
    const { words } = objectOf(text, `fields[${index}]`);
    if (words === undefined) return usual;
    return typeof words === "string" && /\p{L}/u.test(words) ? wordSet(words) : null;
  });
}

// Return words that are separated by commas as a set.
export function wordSet(text) {
  return new Set(text.toLowerCase().split(","));
}

// Return the JSON object in a text. The error does not quote the text, which is part of a prompt.
function objectOf(text, name) {
  try {
    const object = JSON.parse(text);
    if (object !== null && typeof object === "object" && !Array.isArray(object)) return object;
  } catch {
    // Refused below.
  }
  throw new InvalidRequest(`${name}: expected a JSON object`);
}

// Return the scores of a response message. A text without wanted words has NaN and the outcome REFUSED: a failure is never a number.
export function scoresOf(texts, words) {
  const scores = texts.map((text, index) => (words[index] ? scoreOf(text, words[index]) : NaN));
  if (!words.includes(null)) return { scores: tensorOf(scores) };
  return {
    scores: tensorOf(scores),
    outcomes: words.map((each) => (each ? "OUTCOME_OK" : "OUTCOME_REFUSED")),
    details: words.map((each) => (each ? "" : "the field words has no word")),
  };
}

// Return the score of a text: the letters of wanted words, per letter of the text.
export function scoreOf(text, words) {
  const letters = text.toLowerCase().match(/\p{L}+/gu) ?? [];
  const wanted = letters.filter((word) => words.has(word)).join("").length;
  return wanted / Math.max(1, letters.join("").length);
}
