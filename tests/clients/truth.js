// Programs whose retries are known: node truth.js HOW HOST PORT SECONDS RATE RETRIES, as truth.py. HOW: fetch,
// http, or undici (its RetryAgent; needs the package).
const http = require("node:http");

const [how, host, port, seconds, rate, most] = process.argv.slice(2);
const counts = { calls: 0, retries: 0 };
const end = Date.now() + seconds * 1000;
const origin = `http://${host}:${port}`;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function fetched(path) {
  const answer = await fetch(origin + path);
  await answer.arrayBuffer();
  if (answer.status >= 500) throw new Error(`status ${answer.status}`);
}

function got(path) {
  return new Promise((resolve, reject) => {
    http
      .get({ host, port, path, agent: false }, (response) => {
        response.resume();
        response.on("end", () => {
          if (response.statusCode < 500) resolve();
          else reject(new Error(`status ${response.statusCode}`));
        });
        response.on("error", reject);
      })
      .on("error", reject);
  });
}

// The agent retries by itself, and says how often in a hook of its own.
function retryAgent() {
  const { Agent, RetryAgent, RetryHandler } = require("undici");
  const options = { maxRetries: Number(most), minTimeout: 5, maxTimeout: 50 };
  const standard = new RetryHandler(
    { path: "/", retryOptions: options },
    { dispatch: () => true, handler: { onConnect() {} } },
  ).retryOpts.retry;
  const agent = new RetryAgent(new Agent(), {
    ...options,
    retry(error, context, callback) {
      standard(error, context, (failed) => {
        if (!failed) counts.retries += 1;
        callback(failed);
      });
    },
  });
  return async (path) => {
    const answer = await agent.request({ origin, path, method: "GET" });
    await answer.body.dump();
    if (answer.statusCode >= 500) throw new Error(`status ${answer.statusCode}`);
  };
}

const ask = how === "undici" ? retryAgent() : how === "fetch" ? fetched : got;
const own = how === "undici" ? 0 : Number(most);

async function operation() {
  counts.calls += 1;
  const path = `/${how}/${counts.calls}`;
  for (let attempt = 0; attempt <= own; attempt += 1) {
    if (attempt > 0) counts.retries += 1;
    try {
      return await ask(path);
    } catch {
      // The next attempt, or nothing.
    }
  }
}

// Begun at random times, whether or not others are under way.
(async () => {
  const all = [];
  while (Date.now() < end) {
    all.push(operation());
    await sleep((-Math.log(1 - Math.random()) * 1000) / rate);
  }
  await Promise.all(all);
  process.stdout.write(`${JSON.stringify(counts)}\n`, () => process.exit(0));
})();
