//! What counts as repeated, and what is told of it.

use std::sync::Arc;

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::Server,
    tls::{self, Behaviour, Certificate, TlsServer},
    wait,
};

use crate::scene::{COUNTS, DESTINATION, ECONNABORTED, REFUSES, SOON, Scene, serve};

/// Calls of one program to a destination of its own, that all fail; how many of them are retries, and how
/// many of those are not idempotent.
struct Case {
    name: &'static str,
    calls: [&'static str; 2],
    non_idempotent: u64,
}

const CASES: [Case; 15] = [
    Case {
        name: "a post that is repeated",
        calls: ["ask('POST /bad/order', body='{}')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "without a body",
        calls: ["ask('PATCH /bad/order')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "LOCK",
        calls: ["ask('LOCK /ill/order', body='{}')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "with a key",
        calls: ["ask('POST /bad/order', 'X: y', 'idempotency-key: 7', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "with a head longer than is searched",
        calls: ["ask('POST /bad/order', 'Cookie: ' + 'c' * 5000, body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "GET",
        calls: ["ask('GET /bad/order')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "PUT",
        calls: ["ask('PUT /bad/order', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "DELETE",
        calls: ["ask('DELETE /bad/order')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "a method that is not known",
        calls: ["ask('REPORT /bad/order', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "another target",
        calls: ["ask('POST /bad/order/1')", "ask('POST /bad/order/2')"],
        non_idempotent: 0,
    },
    Case {
        name: "the same long target",
        calls: ["ask('POST /bad/' + 'o' * 80 + '/1')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "another long target",
        calls: [
            "ask('POST /bad/' + 'o' * 80 + '/1')",
            "ask('POST /bad/' + 'o' * 80 + '/2')",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "another body",
        calls: [
            "ask('POST /bad/order', 'A: ' + 'a' * 40, body='{\"id\": 7}')",
            "ask('POST /bad/order', 'A: ' + 'a' * 40, body='{\"id\": 8}')",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "a body with another middle",
        calls: [
            "ask('POST /bad/order', body='a' * 400 + '7' + 'b' * 400)",
            "ask('POST /bad/order', body='a' * 400 + '8' + 'b' * 400)",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "a body that may be the same, as far as it is compared",
        calls: [
            "ask('POST /bad/order', body='a' * 1400 + '7' + 'b' * 400)",
            "ask('POST /bad/order', body='a' * 1400 + '8' + 'b' * 400)",
        ],
        non_idempotent: 1,
    },
];

#[test]
fn what_counts() {
    let mut scene = Scene::new(COUNTS);
    let mut servers = Vec::new();
    for (port, case) in (8081..).zip(CASES) {
        let asked = Arc::clone(&scene.asked);
        let serve = move |stream| serve(stream, &asked);
        servers.push(Server::with(
            &scene.net.server,
            TestNet::server4(port),
            serve,
        ));
        scene.program.run(&format!("TO = ('10.77.0.2', {port})"));
        for call in case.calls {
            let is_ill = call.contains("/ill");
            let expected = if is_ill { "HTTP/1.1 503 No" } else { "" };
            assert_eq!(scene.do_(call), expected, "{}", case.name);
        }
        let destination = format!("10.77.0.2:{port}");
        let quiet = |row: &Value| row["in_flight"] == 0;
        let row = scene.agent.wait_row(&destination, "quiet", quiet);
        assert_eq!(row["attempts"], 2, "{}: {row:#}", case.name);
        let retry = &row["retry"];
        // (What asks for something else is none, which is asserted where two may not share a place by chance.)
        if case.calls[0] == case.calls[1] || case.non_idempotent != 0 {
            assert_eq!(retry["retries"], 1, "{}: {row:#}", case.name);
        }
        let counted = &retry["non_idempotent"];
        assert_eq!(counted, case.non_idempotent, "{}: {row:#}", case.name);
        assert_eq!(retry["non_idempotent_refused"], 0, "{}: {row:#}", case.name);
        assert_eq!(retry["live"], 0, "{}: {row:#}", case.name);
    }
}

/// Nothing that was not sent can be sent twice.
#[test]
fn a_connect_that_failed_has_asked_for_nothing() {
    let mut scene = Scene::new(REFUSES);
    scene.program.run("TO = ('10.77.0.2', 8081)");
    let refused = scene.do_("ask('POST /order', body='{}')");
    assert_eq!(refused, i64::from(libc::ECONNREFUSED));
    let asked = Arc::clone(&scene.asked);
    let at = TestNet::server4(8081);
    let _other = Server::with(&scene.net.server, at, move |stream| serve(stream, &asked));
    assert_eq!(scene.do_("ask('POST /bad/order', body='{}')"), "");
    let row = (scene.agent).wait_row("10.77.0.2:8081", "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["retry"]["retries"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 0, "{row:#}");
    // But what is sent then can.
    let again = scene.do_("ask('POST /bad/order', body='{}')");
    assert_eq!(again, ECONNABORTED);
}

/// Each event names its method, whatever else happens within its second.
#[test]
fn events_add_up_for_each_method() {
    let mut scene = Scene::new(COUNTS);
    let calls =
        |method: &str| format!("[ask('{method} /bad/order', body='{{}}') for _ in range(3)]");
    scene.do_(&format!("{} + {}", calls("POST"), calls("PATCH")));
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 4, "{row:#}");
    wait::until("all told", SOON, || {
        let events = scene.events(2);
        let told = |method: &str| -> u64 {
            let of = events.iter().filter(|event| event["method"] == method);
            of.filter_map(|event| event["count"].as_u64()).sum()
        };
        let both = [told("POST"), told("PATCH")];
        assert!(both[0] <= 2 && both[1] <= 2, "{events:#?}");
        assert!(
            events.iter().all(|event| event["refused"] == false),
            "{events:#?}"
        );
        (both == [2, 2]).then_some(())
    });
}

#[test]
fn tls_tells_nothing() {
    need!("openssl");
    let net = TestNet::new();
    let group = TestCgroup::new("idempotent");
    // Long enough for a handshake on a busy machine.
    let config = format!("{REFUSES}[defaults.timeouts]\nread = \"2s\"\n");
    let agent = Agent::start(&group, &config);
    let certificate = Certificate::new();
    let hangs = Behaviour {
        version: "1.3",
        tickets: 0,
        answers: 0,
        delay_ms: 0,
    };
    let _server = TlsServer::start(&net.server, &certificate.both(), hangs);
    let mut program = Interpreter::start(&group, &net.client);
    program.value(tls::CONTEXT);
    for _ in 0..4 {
        program.value(tls::CONNECT);
        let post =
            "s.sendall(b'POST /order HTTP/1.1\\r\\nContent-Length: 2\\r\\n\\r\\n{}') or s.recv(9)";
        // To Python the end of a TLS stream is as good as any.
        assert_eq!(program.value(post), "b''");
        program.value("s.close()");
    }
    // (The program is told before it is counted.)
    let all = |row: &Value| row["failures"]["read_timeout"] == 4;
    let row = agent.wait_row(DESTINATION, "four timeouts", all);
    assert_eq!(row["attempts"], 4, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 0, "{row:#}");
}
