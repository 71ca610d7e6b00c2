// Asks N times one after the other, each with up to R retries at once: node retrying.js HOST PORT N R PAUSE_MS.
const http = require("node:http");

const [host, port, operations, retries, pause] = process.argv.slice(2);

function ask() {
  return new Promise((resolve) => {
    http
      .get({ host, port, path: "/", agent: false }, (response) => {
        response.resume();
        response.on("end", () => resolve(response.statusCode < 500));
        response.on("error", () => resolve(false));
      })
      .on("error", () => resolve(false));
  });
}

(async () => {
  for (let operation = 0; operation < operations; operation += 1) {
    for (let attempt = 0; attempt <= retries; attempt += 1) {
      if (await ask()) break;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
})();
