//! What is refused, and what becomes of it.

use rustix::process::Signal;
use serde_json::Value;
use tests::wait;

use crate::scene::{DESTINATION, ECONNABORTED, REFUSES, SOON, Scene};

#[test]
fn a_refusal_ends_the_connection_before_anything_has_left() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    for _ in 0..2 {
        assert_eq!(scene.do_(post), ECONNABORTED);
    }
    // Other requests pass, and so does what is no retry.
    assert_eq!(scene.do_("ask('GET /bad/order')"), "");
    assert_eq!(scene.do_("ask('GET /order')"), "HTTP/1.1 200 OK");
    assert_eq!(
        scene.do_("ask('POST /order', body='{\"id\": 8}')"),
        "HTTP/1.1 200 OK"
    );
    assert_eq!(scene.reached("POST /bad"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
    assert_eq!(row["failures"]["closed_early"], 2, "{row:#}");
    let told = &scene.events(1)[0];
    assert_eq!(told["destination"], DESTINATION, "{told:#}");
    assert_eq!(told["workload"], scene.row()["workload"], "{told:#}");
    assert_eq!(told["method"], "POST", "{told:#}");
    assert_eq!(told["refused"], true, "{told:#}");
    assert_eq!(told["mode"], "enforce", "{told:#}");
    let is_python = |comm: &Value| comm.as_str().is_some_and(|comm| comm.starts_with("python"));
    assert!(is_python(&told["comm"]), "{told:#}");
    let metric = |result: &str| {
        let labels = [format!("result=\"{result}\"")];
        scene.agent.metric("backstop_non_idempotent_total", &labels)
    };
    assert_eq!(metric("refused"), Some(2.0));
    assert_eq!(metric("passed"), Some(0.0));
    wait::until("a line in the log", SOON, || {
        let log = scene.agent.log();
        assert!(!log.contains("not enforced"), "{log}");
        let line = "POST repeated after a failure and refused";
        log.contains(line).then_some(())
    });
}

/// What the program sends next makes the kernel try again at once: the packet is dropped again, whether its
/// connection has been ended by then or not.
#[test]
fn what_is_sent_behind_a_refused_request_does_not_leave() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    for _ in 0..15 {
        let more = "ask('POST /bad/order', body='{\"id\": 7}', times=20)";
        let got = scene.do_(more);
        assert!(
            got == ECONNABORTED || got == i64::from(libc::EPIPE),
            "{got}"
        );
    }
    assert_eq!(scene.reached("POST"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 15, "{row:#}");
    // What was refused within a second of another is told when it is over.
    wait::until("fifteen told", SOON, || {
        let counts = scene.events(1);
        let told: u64 = (counts.iter())
            .filter_map(|event| event["count"].as_u64())
            .sum();
        assert!(told <= 15, "{counts:#?}");
        (told == 15).then_some(())
    });
}

/// An agent that is stopped refuses nothing: the request leaves with its next resend, and is answered. What the
/// agent was told before is void by then.
#[test]
fn a_request_that_has_left_after_all_is_not_ended() {
    let mut scene = Scene::new(REFUSES);
    let post = "('POST /ill/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(&format!("ask{post}")), "HTTP/1.1 503 No");
    scene.agent.signal(Signal::STOP);
    let got = scene.do_(&format!("kept{post}"));
    scene.agent.signal(Signal::CONT);
    assert_eq!(got, "HTTP/1.1 503 No");
    // It has taken up what was to be done.
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    scene.events(1);
    assert_eq!(scene.do_("kept('GET /order')"), "HTTP/1.1 200 OK");
    assert_eq!(scene.row()["attempts"], 2);
}

#[test]
fn observe_mode_lets_pass() {
    let mut scene = Scene::new(&format!("mode = \"observe\"\n{REFUSES}"));
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    for _ in 0..2 {
        assert_eq!(scene.do_(post), "");
    }
    assert_eq!(scene.reached("POST /bad"), 2);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_would_refuse"], 1, "{row:#}");
    let told = &scene.events(1)[0];
    assert_eq!(
        (&told["refused"], &told["mode"]),
        (&true.into(), &"observe".into())
    );
}

#[test]
fn what_is_held_closed_or_paused_passes() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["hold-closed", DESTINATION]).good();
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["pause"]).good();
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["resume"]).good();
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(scene.reached("POST /bad"), 3);
}

/// Refused is only what was compared to its last byte, wherever the difference may lie.
#[test]
fn what_differs_anywhere_or_is_not_known_to_the_end_is_never_refused() {
    let mut scene = Scene::new(REFUSES);
    let calls = [
        // Nowhere the same.
        "ask('POST /bad/order', body='a' * 400 + '{}' + 'b' * 400)",
        // Longer than what is compared.
        "ask('POST /bad/long', body='a' * 1800 + '{}' + 'b' * 50)",
        // The last bytes come later.
        "apart('POST /bad/late', body='a' * 100 + '{}', packets=5)",
        // It comes in chunks, of which there may be more.
        "ask('POST /bad/chunks', 'Transfer-Encoding: chunked\\r\\n\\r\\n1\\r\\n{}')",
        // It says nothing of its end that holds.
        "ask('POST /bad/twice', 'Content-Length: 1', body='{}')",
    ];
    for (at, call) in calls.iter().enumerate() {
        for number in 0..2 {
            // Only the first ones differ within what was looked at.
            let number = if at < 3 { number } else { 7 };
            let got = scene.do_(&call.replace("{}", &number.to_string()));
            // (It has not read the chunk.)
            assert!(
                got == "" || got == i64::from(libc::ECONNRESET),
                "{call}: {got}"
            );
        }
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 10, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    // And one that is the same to the last byte is.
    let post = "ask('POST /bad/order', body='a' * 801)";
    assert_eq!(scene.do_(post), "");
    assert_eq!(scene.do_(post), ECONNABORTED);
}
