// Asks for / on one connection: address, port, count. Prints the wait for each answer, us.
const http = require("node:http");

const [host, port, count] = process.argv.slice(2);
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });

function ask(left) {
  if (left === 0) {
    agent.destroy();
    return;
  }
  let asked;
  const request = http.get({ host, port, path: "/", agent }, (response) => {
    console.log(Number(process.hrtime.bigint() - asked) / 1000);
    response.resume().on("end", () => ask(left - 1));
  });
  // The request is written once there is a connection.
  request.on("finish", () => (asked = process.hrtime.bigint()));
}

ask(Number(count));
