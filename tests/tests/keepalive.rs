//! Keepalive from outside, for connections whose program has not asked for it.

use serde_json::json;
use tests::{
    need,
    talk::{CONNECT, DESTINATION, Talk, wait_end},
};

fn scene(label: &str, keepalive: &str) -> Talk {
    let config = format!("[defaults.timeouts]\nkeepalive = \"{keepalive}\"\n");
    Talk::under(label, &config, OPTIONS, wait_end)
}

/// Keepalive: on or off, idle time, interval, probes.
const OPTIONS: &str = "
def options(s):
    tcp = [s.getsockopt(socket.IPPROTO_TCP, name)
           for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
    return [s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *tcp]
";

#[test]
fn it_is_switched_on_and_given_back() {
    need!("python3");
    let mut scene = scene("keepalive", "40s");
    scene.python.value(CONNECT);
    assert_eq!(scene.python.value("options(s)"), json!([1, 40, 10, 4]));
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["timeouts_ms"]["keepalive"], 40_000, "{row:#}");
    scene.agent.command(&["pause", "--for", "10m"]).good();
    assert_eq!(scene.python.value("options(s)[0]"), 0);
    // Paused, nothing is set.
    scene.python.value(CONNECT);
    assert_eq!(scene.python.value("options(s)[0]"), 0);
    scene.agent.command(&["resume"]).good();
    scene.python.value(CONNECT);
    assert_eq!(scene.python.value("options(s)[0]"), 1);
    scene.agent.stop().good();
    assert_eq!(scene.python.value("options(s)[0]"), 0);
}

/// A program that has asked for it keeps its own times, before and after the connect.
#[test]
fn the_programs_own_stays() {
    need!("python3");
    let mut scene = scene("keepalive-own", "40s");
    scene.python.run(
        "
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
s.connect(('10.77.0.2', 8080))
",
    );
    assert_eq!(scene.python.value("options(s)[:2]"), json!([1, 77]));
    scene.python.value(CONNECT);
    scene
        .python
        .run("s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 55)");
    scene.agent.stop().good();
    // It has taken ours over.
    assert_eq!(scene.python.value("options(s)[:2]"), json!([1, 55]));
}

/// A program that waits long and rightly learns that its peer is gone: after 1 s and four probes.
#[test]
fn a_dead_peer_is_noticed() {
    need!("python3", "nft");
    let mut scene = scene("keepalive-dead", "1s");
    scene.python.value(CONNECT);
    scene.net.server.nft(
        "add table inet gone\n\
         add chain inet gone in { type filter hook input priority 0; policy drop; }\n",
    );
    assert_eq!(scene.python.errno("s.recv(9)"), libc::ETIMEDOUT);
}
