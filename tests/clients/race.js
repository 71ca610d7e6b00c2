// Connects to a name of several addresses, as Node does: argv is port and addresses. Prints who won.
const net = require("node:net");

const [port, ...addresses] = process.argv.slice(2);
const all = addresses.map((address) => ({ address, family: net.isIPv6(address) ? 6 : 4 }));
const socket = net.connect({
  host: "name.test",
  port: Number(port),
  autoSelectFamily: true,
  lookup: (host, options, done) => done(null, all),
});
socket.on("connect", () => {
  console.log(socket.remoteAddress);
  socket.destroy();
});
socket.on("error", (error) => {
  console.error(error);
  process.exitCode = 7;
});
