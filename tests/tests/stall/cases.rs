//! Answers of HTTP/1 with a silence in them that is no stall.

/// What the server does with one request.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its path.
    pub path: &'static str,
    /// What is sent before the silence, each part as a segment of its own.
    pub first: &'static [&'static str],
    /// What is sent after it.
    pub last: &'static str,
    /// What the program sends; by default a GET of the path.
    pub request: &'static str,
    /// What it sends once the first part has come.
    pub beside: &'static str,
    /// No further request can follow.
    pub is_over: bool,
}

pub const PONG: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong";

/// Silences that are no stall, whatever the policy sets.
pub const HEALTHY: &[Case] = &[
    Case {
        path: "/finished",
        first: &[PONG],
        ..DEFAULT
    },
    Case {
        path: "/head",
        first: &["HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"],
        request: "HEAD /head HTTP/1.1\r\nHost: x\r\n\r\n",
        ..DEFAULT
    },
    Case {
        path: "/204",
        first: &["HTTP/1.1 204 No Content\r\nContent-Length: 100\r\n\r\n"],
        ..DEFAULT
    },
    Case {
        path: "/304",
        first: &["HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n"],
        ..DEFAULT
    },
    Case {
        path: "/chunked",
        first: &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "2\r\nok\r\n",
            "0\r\n\r\n",
        ],
        ..DEFAULT
    },
    Case {
        path: "/chunked-at-once",
        first: &["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"],
        ..DEFAULT
    },
    Case {
        path: "/chunked-with-trailers",
        first: &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
            "0\r\nX: y\r\n\r\n",
        ],
        ..DEFAULT
    },
    Case {
        path: "/chunked-in-pieces",
        first: &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
            "0\r\n",
            "\r\n",
        ],
        ..DEFAULT
    },
    Case {
        path: "/events",
        first: &[
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
            "a\r\ndata: one\n\r\n",
        ],
        last: "a\r\ndata: two\n\r\n0\r\n\r\n",
        ..DEFAULT
    },
    Case {
        path: "/websocket",
        first: &[
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
            "\u{1}\u{1}y",
        ],
        last: "\u{1}\u{1}z",
        is_over: true,
        ..DEFAULT
    },
    Case {
        path: "/until-close",
        first: &["HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", "one"],
        last: "two",
        is_over: true,
        ..DEFAULT
    },
    // Not known, so not ended: the head comes in pieces, or is too long.
    Case {
        path: "/pieces",
        first: &["HTTP/1.1 200 OK\r\nContent-Len", "gth: 6\r\n\r\none"],
        last: "two",
        ..DEFAULT
    },
    Case {
        path: "/long-head",
        first: &["HTTP/1.1 200 OK\r\nX: LONG\r\nContent-Length: 6\r\n\r\none"],
        last: "two",
        ..DEFAULT
    },
    // An echo that waits for the program, which goes on sending when it likes.
    Case {
        path: "/upload",
        first: &["HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\none"],
        last: "two",
        request: "POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\none",
        beside: "t",
        ..DEFAULT
    },
];

/// Silences that are healthy only where the policy does not set `stall`.
pub const PAUSES: &[Case] = &[Case {
    path: "/watch",
    first: &[
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "3\r\none\r\n",
    ],
    last: "3\r\ntwo\r\n0\r\n\r\n",
    ..DEFAULT
}];

pub const DEFAULT: Case = Case {
    path: "",
    first: &[],
    last: "",
    request: "",
    beside: "",
    is_over: false,
};

impl Case {
    /// What is sent before the silence.
    pub fn first(&self) -> Vec<String> {
        let long = "x".repeat(1100);
        self.first
            .iter()
            .map(|part| part.replace("LONG", &long))
            .collect()
    }
}
