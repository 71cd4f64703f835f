// The vocabulary of a tokenizer.json: token texts by id, and the fingerprint by which Quartet compares vocabularies.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

export class Vocabulary {
  // `path` is a tokenizer.json of a byte-level BPE, as GPT-2, Llama 3 and Qwen have it.
  constructor(path) {
    const file = JSON.parse(readFileSync(path, "utf8"));
    const ids = new Map(Object.entries(file.model.vocab));
    for (const added of file.added_tokens ?? []) ids.set(added.content, added.id);
    this.special = new Set((file.added_tokens ?? []).filter((added) => added.special).map((added) => added.id));
    this.tokens = [];
    for (const [token, id] of ids) this.tokens[id] = token;
    this.size = this.tokens.length;
    this.fingerprint = fingerprint(ids);
  }

  // Return the text of token ids, without special tokens.
  decode(ids) {
    const bytes = [];
    for (const id of ids) {
      if (this.special.has(id)) continue;
      for (const character of this.tokens[id] ?? "") bytes.push(BYTES.get(character) ?? 63);
    }
    return Buffer.from(bytes).toString("utf8");
  }
}

// Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on.
const BYTES = new Map();
for (let byte = 0, extra = 0; byte < 256; byte++) {
  const printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  BYTES.set(String.fromCodePoint(printable ? byte : 256 + extra++), byte);
}

// Return the SHA-256 of the lines "TOKEN ID", sorted by code points, with the token as a Python literal.
function fingerprint(ids) {
  const entries = [...ids].map(([token, id]) => [Buffer.from(token, "utf8"), token, id]);
  entries.sort(([left], [right]) => Buffer.compare(left, right));
  const digest = createHash("sha256");
  for (const [, token, id] of entries) digest.update(`${pythonLiteral(token)} ${id}\n`, "utf8");
  return digest.digest("hex");
}

const NOT_PRINTABLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Zs}]/u;
const ESCAPES = new Map([["\\", "\\\\"], ["\n", "\\n"], ["\r", "\\r"], ["\t", "\\t"]]);

export function pythonLiteral(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  let literal = "";
  for (const character of text) {
    const code = character.codePointAt(0);
    if (character === quote) literal += `\\${quote}`;
    else if (ESCAPES.has(character)) literal += ESCAPES.get(character);
    else if (character === " " || !NOT_PRINTABLE.test(character)) literal += character;
    else if (code < 0x100) literal += `\\x${code.toString(16).padStart(2, "0")}`;
    else if (code < 0x10000) literal += `\\u${code.toString(16).padStart(4, "0")}`;
    else literal += `\\U${code.toString(16).padStart(8, "0")}`;
  }
  return quote + literal + quote;
}
