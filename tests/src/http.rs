//! As much HTTP/1.1 as asking an agent takes.

use std::io::{Read, Write};

/// An answer.
#[derive(Debug)]
pub struct Response {
    /// Status, such as 200.
    pub status: u16,
    /// Body, chunks put together.
    pub body: String,
}

/// Sends one request and reads the whole answer.
///
/// # Errors
/// When the connection breaks; what is not HTTP panics.
pub fn request(
    mut stream: impl Read + Write,
    method: &str,
    target: &str,
) -> std::io::Result<Response> {
    write!(
        stream,
        "{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    )?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    let all = String::from_utf8(all).expect("an answer in UTF-8");
    let (head, body) = all
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("not HTTP: {all:?}"));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse().ok())
        .expect("a status");
    let chunked = head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked");
    let body = if chunked {
        unchunk(body)
    } else {
        body.to_owned()
    };
    Ok(Response { status, body })
}

fn unchunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).expect("a chunk's size");
        if size == 0 {
            break;
        }
        body.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
    body
}
