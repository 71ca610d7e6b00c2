// Many calls at once, without any timeout of their own. Input and output as in cells.c.
const net = require("node:net");
const fs = require("node:fs");

const chunk = Buffer.alloc(65536);
const now = () => process.hrtime.bigint();

function call(index, kind, valueMs, host, port) {
  let begin = now();
  const socket = net.connect({ host, port: Number(port) });
  const pour = () => {
    socket.write(chunk, (error) => {
      if (error || socket.destroyed) return;
      begin = now();
      pour();
    });
  };
  socket.on("connect", () => {
    if (kind === "write") {
      begin = now();
      pour();
      return;
    }
    socket.write("GET / HTTP/1.1\r\n");
    const rest = () =>
      socket.write("Host: cells\r\n\r\n", () => {
        if (kind === "read") begin = now();
      });
    if (kind === "deadline") setTimeout(rest, valueMs * 0.3);
    else rest();
  });
  let said = 0;
  socket.on("error", (error) => (said = error.errno ?? -1));
  socket.on("close", () => console.log(index, -said, (now() - begin) / 1000n + ""));
}

console.log("ready");
const lines = fs.readFileSync(0, "utf8").trim().split("\n");
lines.forEach((line, index) => call(index, ...line.split(" ")));
