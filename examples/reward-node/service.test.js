import assert from "node:assert/strict";
import { test } from "node:test";

import { InvalidRequest, responsesOf, scoreOf, scoresOf, tensorOf, wordsOf } from "./scoring.js";
import { pythonLiteral } from "./vocabulary.js";

const integers = (...values) => ({
  dtype: "DATA_TYPE_INT32",
  shape: [values.length],
  data: Buffer.from(Int32Array.from(values).buffer),
});
const batch = (ids, prompts, responses) => ({
  token_ids: integers(...ids),
  prompt_lengths: integers(...prompts),
  response_lengths: integers(...responses),
});

test("responses are cut out of a ragged batch", () => {
  const responses = responsesOf(batch([1, 2, 3, 4, 5, 6], [1, 2], [2, 1]), 10, 10);
  assert.deepEqual(responses.map((response) => [...response]), [[2, 3], [6]]);
});

test("invalid batches are refused", () => {
  for (const wrong of [batch([], [], []), batch([1], [0], [1]), batch([1, 2, 3], [1], [1]), batch([1, 10], [1], [1])]) {
    assert.throws(() => responsesOf(wrong, 10, 10), InvalidRequest);
  }
  assert.throws(() => responsesOf(batch([1, 2, 3], [1], [2]), 10, 2), InvalidRequest);
});

test("a score is the share of letters in wanted words", () => {
  assert.equal(scoreOf("Great, a fox", new Set(["great"])), 5 / 9);
  assert.equal(scoreOf("", new Set(["great"])), 0);
});

test("the field words replaces the wanted words of a sequence", () => {
  const usual = new Set(["great"]);
  assert.deepEqual(wordsOf([], 2, usual), [usual, usual]);
  assert.deepEqual(wordsOf(['{"words": "Fox,owl"}', '{"answer": 1}'], 2, usual), [new Set(["fox", "owl"]), usual]);
  for (const wrong of [["{}"], ["[1]", "{}"], ["{", "{}"]]) assert.throws(() => wordsOf(wrong, 2, usual), InvalidRequest);
});

test("a sequence without wanted words has NaN and an outcome", () => {
  const words = wordsOf(['{"words": "fox"}', '{"words": ""}', '{"words": 3}'], 3, new Set());
  const { scores, outcomes, details } = scoresOf(["fox", "fox", "fox"], words);
  const numbers = [0, 4, 8].map((start) => scores.data.readFloatLE(start));
  assert.deepEqual(numbers, [1, NaN, NaN]);
  assert.deepEqual(outcomes, ["OUTCOME_OK", "OUTCOME_REFUSED", "OUTCOME_REFUSED"]);
  assert.deepEqual(details, ["", "the field words has no word", "the field words has no word"]);
  assert.equal(scoresOf(["fox"], [new Set(["fox"])]).outcomes, undefined);
});

test("scores travel as little-endian float32", () => {
  assert.deepEqual([...tensorOf([1]).data], [0, 0, 128, 63]);
});

test("tokens are written as Python writes them", () => {
  assert.deepEqual(["a'b", "a'\"", "\n\\", "\u00a0\u0120", "\u{1f600}", "\u200b"].map(pythonLiteral), [
    '"a\'b"',
    "'a\\'\"'",
    "'\\n\\\\'",
    "'\\xa0Ġ'",
    "'😀'",
    "'\\u200b'",
  ]);
});
