//! Connections that are kept, and what is learnt of programs.

use crate::scene::{COUNTS, ECONNABORTED, REFUSES, Scene};

/// A program that keeps its connection, and asks for something else each time but when something has failed.
fn keeps(scene: &mut Scene) {
    assert_eq!(scene.do_("kept('GET /ill')"), "HTTP/1.1 503 No");
    for number in 0..12 {
        let call = format!("kept('GET /{number}')");
        assert_eq!(scene.do_(&call), "HTTP/1.1 200 OK");
    }
}

#[test]
fn retries_on_a_connection_that_is_kept() {
    let mut scene = Scene::new(COUNTS);
    keeps(&mut scene);
    let post = "kept('POST /ill/order', body='{\"id\": 7}')";
    // All at once: who pauses for long between them, because a test is slow to ask, does not retry.
    let calls = [post, post, post, "kept('GET /7')", "kept('GET /7')"].join(", ");
    scene.do_(&format!("[{calls}]"));
    let row = scene.row();
    assert_eq!(row["attempts"], 1, "{row:#}");
    assert_eq!(row["retry"]["live"], 2, "{row:#}");
    assert_eq!(row["retry"]["retries"], 0, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
    // 18 requests: one operation took three.
    let operations = serde_json::json!([15, 0, 1, 0, 0]);
    assert_eq!(row["retry"]["operations"], operations, "{row:#}");
    assert_eq!(row["retry"]["amplification"], 18.0 / 16.0, "{row:#}");
    let live = scene.agent.metric("backstop_live_retries_total", &[]);
    assert_eq!(live, Some(2.0));
}

#[test]
fn a_retry_on_a_connection_that_is_kept_is_refused() {
    let mut scene = Scene::new(REFUSES);
    keeps(&mut scene);
    let post = "kept('POST /ill/order', body='{\"id\": 7}')";
    let both = scene.do_(&format!("[{post}, {post}]"));
    let expected = serde_json::json!(["HTTP/1.1 503 No", ECONNABORTED]);
    assert_eq!(both, expected);
    assert_eq!(scene.reached("POST /ill"), 1);
    let other = "kept('POST /order', body='{\"id\": 8}')";
    assert_eq!(scene.do_(other), "HTTP/1.1 200 OK");
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 1, "{row:#}");
}

/// Where the first failure of a program is on a connection that it keeps, as curl's is.
#[test]
fn the_very_first_request_on_a_connection_that_is_kept() {
    let mut scene = Scene::new(REFUSES);
    let post = "kept('POST /ill/order', body='{\"id\": 7}')";
    let all = scene.do_(&format!("[{post}, {post}, {post}]"));
    let expected = serde_json::json!(["HTTP/1.1 503 No", ECONNABORTED, ECONNABORTED]);
    assert_eq!(all, expected);
    assert_eq!(scene.reached("POST"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
}

/// Also where the connection has served others, and is lost with the request that fails.
#[test]
fn every_repeat_is_refused() {
    let mut scene = Scene::new(REFUSES);
    keeps(&mut scene);
    let post = "kept('POST /bad/order', body='{\"id\": 7}')";
    let all = scene.do_(&format!("[{post}, {post}, {post}, {post}, {post}]"));
    let refused = ECONNABORTED;
    assert_eq!(
        all,
        serde_json::json!(["", refused, refused, refused, refused])
    );
    assert_eq!(scene.reached("POST"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 4, "{row:#}");
}

/// What went well before may be a poll: that it fails once, and is asked again, says nothing.
#[test]
fn what_is_asked_for_again_and_again_passes() {
    let mut scene = Scene::new(REFUSES);
    let all = scene.do_("[ask('POST /twice', body='{}') for _ in range(8)]");
    let good = "HTTP/1.1 200 OK";
    assert_eq!(
        all,
        serde_json::json!([good, good, good, good, "", "", good, good])
    );
    assert_eq!(scene.reached("POST"), 8);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
}

/// Polls look like retries, but that they are as frequent when all is well.
#[test]
fn who_always_asks_the_same_is_not_taken_to_retry() {
    let mut scene = Scene::new(COUNTS);
    scene.do_("kept('GET /ill')");
    // Sooner than after a failure, whatever the machine does.
    scene.do_("[kept('GET /') for _ in range(40)]");
    scene.do_("[time.sleep(0.02) or kept('GET /ill') for _ in range(20)]");
    let row = scene.row();
    assert_eq!(row["retry"]["live"], 0, "{row:#}");
}

#[test]
fn who_takes_up_something_else_is_known_soon_and_forgiven() {
    let mut scene = Scene::new(COUNTS);
    for number in 0..12 {
        assert_eq!(scene.do_(&format!("ask('GET /bad/{number}')")), "");
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 12, "{row:#}");
    // The first three that come after a failure look like retries, until they have asked. (Once in thousands of runs two
    // of them share a place; then one stays.)
    let by_chance = row["retry"]["retries"].as_u64().expect("a count");
    assert!(by_chance <= 1, "{row:#}");
    // It begins to retry: two tell, and those behind them count.
    for _ in 0..4 {
        assert_eq!(scene.do_("ask('GET /bad/11')"), "");
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 16, "{row:#}");
    assert_eq!(row["retry"]["retries"], by_chance + 2, "{row:#}");
}
