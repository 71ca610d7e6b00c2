// Posts with fetch: node post.js URL CALL..., where a call is a method (KEY: POST with an Idempotency-Key) and a body.
// Prints a line for each: the status, or what has failed.
const [url, ...calls] = process.argv.slice(2);

(async () => {
  for (const call of calls) {
    let [method, body] = call.split(" ");
    const headers = { "Content-Type": "application/json" };
    if (method === "KEY") {
      method = "POST";
      headers["Idempotency-Key"] = "7";
    }
    try {
      const response = await fetch(url, { method, headers, body });
      await response.arrayBuffer();
      console.log(response.status);
    } catch (error) {
      console.log(error.cause ? error.cause.code : error.message);
    }
  }
})();
