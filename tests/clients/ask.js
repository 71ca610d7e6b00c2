// Asks for / with Node's http module.
const http = require("node:http");

const [host, port] = process.argv.slice(2);
http
  .get({ host, port, path: "/", agent: false }, (response) => {
    response.setEncoding("utf8");
    response.on("data", (text) => console.log(response.statusCode, text.trim()));
  })
  .on("error", (error) => {
    console.error(error.code, error.errno, error.message);
    process.exitCode = 7;
  });
