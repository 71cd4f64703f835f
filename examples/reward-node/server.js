// A reward service for Quartet. Usage:
//   node server.js --tokenizer DIR/tokenizer.json [--listen 127.0.0.1:50061] [--words superb,lovely] [--protos DIR]
//                  [--max-tokens 4096] [--certificates DIR] [--token-file FILE]

import { randomBytes, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

import { InvalidRequest, responsesOf, scoresOf, wordSet, wordsOf } from "./scoring.js";
import { Vocabulary } from "./vocabulary.js";

const HERE = dirname(fileURLToPath(import.meta.url));
const MAX_MESSAGE_BYTES = 256 * 1024 * 1024;
const SERVICES = ["", "quartet.v1.RewardService"];

const { values: options } = parseArgs({
  options: {
    tokenizer: { type: "string" },
    listen: { type: "string", default: "127.0.0.1:50061" },
    words: { type: "string", default: "superb,lovely,great,perfect" },
    protos: { type: "string", default: join(HERE, "../../proto") },
    "max-tokens": { type: "string", default: "4096" },
    certificates: { type: "string" },
    "token-file": { type: "string" },
  },
});
if (!options.tokenizer) fail("--tokenizer: missing; give the path of the policy's tokenizer.json");
if (!options.certificates && !/^(127\.|localhost:|\[::1\])/.test(options.listen)) {
  fail(`--listen ${options.listen}: not a loopback address; give --certificates, so that calls are encrypted`);
}

const vocabulary = readVocabulary(options.tokenizer);
const words = wordSet(options.words);
const maxTokens = Number(options["max-tokens"]);
const instance = randomBytes(8).toString("hex");
const token = options["token-file"] ? `Bearer ${readFileSync(options["token-file"], "utf8").trim()}` : null;

const definition = loader.loadSync(
  ["quartet/v1/reward.proto", "quartet/v1/status.proto", join(HERE, "health.proto")],
  { includeDirs: [options.protos], keepCase: true, enums: String, longs: Number, defaults: true },
);
const { quartet, grpc: standard } = grpc.loadPackageDefinition(definition);

function fail(message) {
  console.error(`error: ${message}`);
  process.exit(2);
}

function readVocabulary(path) {
  try {
    return new Vocabulary(path);
  } catch (error) {
    return fail(`--tokenizer ${path}: ${error.message}; give a tokenizer.json of a byte-level BPE`);
  }
}

// Return a handler that checks the token, and turns exceptions into status codes. The cause of an unforeseen one stays here.
function method(answer) {
  return (call, callback) => {
    try {
      const sent = Buffer.from(String(call.metadata.get("authorization")[0] ?? ""));
      if (token && (sent.length !== Buffer.byteLength(token) || !timingSafeEqual(sent, Buffer.from(token)))) {
        return callback({ code: grpc.status.UNAUTHENTICATED, details: "the token is missing or wrong" });
      }
      return answer(call.request, callback);
    } catch (error) {
      if (error instanceof InvalidRequest) {
        return callback({ code: grpc.status.INVALID_ARGUMENT, details: error.message });
      }
      console.error(error);
      return callback({ code: grpc.status.INTERNAL, details: "internal error; the service's log has the cause" });
    }
  };
}

function score(request, callback) {
  const responses = responsesOf(request.batch, vocabulary.size, maxTokens);
  const wanted = wordsOf(request.fields, responses.length, words);
  const texts = responses.map((ids) => vocabulary.decode(ids));
  callback(null, scoresOf(texts, wanted));
}

function status(_, callback) {
  const role = {
    role: "ROLE_REWARD",
    model: "words",
    device: "cpu",
    dtype: "float32",
    tokenizer_fingerprint: vocabulary.fingerprint,
    vocabulary_size: vocabulary.size,
    max_sequence_tokens: maxTokens,
    threads: 1,
  };
  callback(null, { roles: [role], version: "reward-node 0.1.0", instance_id: instance });
}

function health(request, callback) {
  if (SERVICES.includes(request.service)) return callback(null, { status: "SERVING" });
  return callback({ code: grpc.status.NOT_FOUND, details: "unknown service" });
}

function credentials() {
  if (!options.certificates) return grpc.ServerCredentials.createInsecure();
  const [authority, key, certificate] = ["ca.crt", "tls.key", "tls.crt"].map((name) =>
    readFileSync(join(options.certificates, "reward", name)),
  );
  return grpc.ServerCredentials.createSsl(authority, [{ private_key: key, cert_chain: certificate }], true);
}

const server = new grpc.Server({
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
  "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  "grpc.so_reuseport": 0,
});
server.addService(quartet.v1.RewardService.service, { Score: method(score) });
server.addService(quartet.v1.StatusService.service, { GetStatus: method(status) });
server.addService(standard.health.v1.Health.service, { Check: method(health) });
server.bindAsync(options.listen, credentials(), (error, port) => {
  if (error) fail(`--listen ${options.listen}: ${error.message}`);
  console.log(`reward-node: listening on ${options.listen.replace(/:\d+$/, "")}:${port}`);
});
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => server.tryShutdown(() => process.exit(0)));
