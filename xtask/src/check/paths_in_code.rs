//! The paths (`std::fs::File`) and macros (`println!`) that a piece of Rust code names, read from
//! its tokens: comments and literals do not count, and `use` trees are taken apart.

/// A name in the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The segments of a path; the last is `*` for a glob. A macro's name ends in `!`.
    pub segments: Vec<String>,
    /// Line number, from 1.
    pub line: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    /// `::`
    Separator,
    Sign(char),
}

/// All paths and macros that `code` names.
pub fn names(code: &str) -> Vec<Name> {
    let tokens = tokens(code);
    let mut names = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let (token, line) = &tokens[at];
        match token {
            Token::Word(word) if word == "use" => {
                at += 1;
                tree(&tokens, &mut at, &[], &mut names);
            }
            Token::Word(_) => {
                let line = *line;
                let mut segments = segments(&tokens, &mut at);
                if matches!(tokens.get(at), Some((Token::Sign('!'), _)))
                    && let Some(last) = segments.last_mut()
                {
                    last.push('!');
                }
                names.push(Name { segments, line });
            }
            _ => at += 1,
        }
    }
    names
}

/// Reads `a::b::c` from a word on.
fn segments(tokens: &[(Token, usize)], at: &mut usize) -> Vec<String> {
    let mut segments = Vec::new();
    while let Some((Token::Word(word), _)) = tokens.get(*at) {
        segments.push(word.clone());
        *at += 1;
        let follows = matches!(tokens.get(*at), Some((Token::Separator, _)))
            && matches!(tokens.get(*at + 1), Some((Token::Word(_), _)));
        if !follows {
            break;
        }
        *at += 1;
    }
    segments
}

/// Reads one branch of a `use` tree; `before` are the segments that lead to it.
fn tree(tokens: &[(Token, usize)], at: &mut usize, before: &[String], names: &mut Vec<Name>) {
    let mut path = before.to_vec();
    while let Some((token, line)) = tokens.get(*at) {
        let line = *line;
        match token {
            Token::Separator => *at += 1,
            Token::Sign('*') => {
                *at += 1;
                path.push("*".to_owned());
                names.push(Name {
                    segments: path,
                    line,
                });
                return;
            }
            Token::Sign('{') => {
                *at += 1;
                while !matches!(tokens.get(*at), None | Some((Token::Sign('}'), _))) {
                    let start = *at;
                    tree(tokens, at, &path, names);
                    if matches!(tokens.get(*at), Some((Token::Sign(','), _))) || *at == start {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            Token::Word(word) => {
                if word != "self" || before.is_empty() {
                    path.push(word.clone());
                }
                *at += 1;
                if !matches!(tokens.get(*at), Some((Token::Separator, _))) {
                    names.push(Name {
                        segments: path,
                        line,
                    });
                    // `as other` belongs to this branch.
                    if matches!(tokens.get(*at), Some((Token::Word(word), _)) if word == "as") {
                        *at += 2;
                    }
                    return;
                }
            }
            Token::Sign(_) => return,
        }
    }
}

/// Splits code into tokens with their lines; comments and literals are dropped.
fn tokens(code: &str) -> Vec<(Token, usize)> {
    let chars: Vec<char> = code.chars().collect();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    let peek = |at: usize| chars.get(at).copied().unwrap_or('\0');
    while at < chars.len() {
        let start = at;
        match chars[at] {
            '/' if peek(at + 1) == '/' => {
                while at < chars.len() && chars[at] != '\n' {
                    at += 1;
                }
            }
            '/' if peek(at + 1) == '*' => at = comment_end(&chars, at),
            '"' => at = string_end(&chars, at + 1),
            '\'' => at = quote_end(&chars, at),
            'r' | 'b' | 'c' if raw_start(&chars, at).is_some() => {
                let (hashes, body) = raw_start(&chars, at).unwrap_or((0, at + 1));
                at = raw_end(&chars, body, hashes);
            }
            ':' if peek(at + 1) == ':' => {
                tokens.push((Token::Separator, line));
                at += 2;
            }
            other if other.is_alphanumeric() || other == '_' => {
                while at < chars.len() && (chars[at].is_alphanumeric() || chars[at] == '_') {
                    at += 1;
                }
                // A literal's prefix (b"..", c"..") is no word.
                let prefix = peek(at) == '"' && at - start <= 2;
                if !prefix && !other.is_ascii_digit() {
                    tokens.push((Token::Word(chars[start..at].iter().collect()), line));
                }
            }
            other => {
                if !other.is_whitespace() {
                    tokens.push((Token::Sign(other), line));
                }
                at += 1;
            }
        }
        line += chars[start..at.min(chars.len())]
            .iter()
            .filter(|char| **char == '\n')
            .count();
    }
    tokens
}

/// The end of a block comment, which may hold others.
fn comment_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start + 2, 1);
    while at < chars.len() && depth > 0 {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (at, depth) = (at + 2, depth + 1),
            ('*', Some('/')) => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], start: usize) -> usize {
    let mut at = start;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// The end of a character literal, or of the quote of a lifetime.
fn quote_end(chars: &[char], start: usize) -> usize {
    match (chars.get(start + 1), chars.get(start + 2)) {
        (Some('\\'), _) => {
            let mut at = start + 3;
            while at < chars.len() && chars[at] != '\'' {
                at += 1;
            }
            at + 1
        }
        (Some(_), Some('\'')) => start + 3,
        _ => start + 1,
    }
}

/// At `r"`, `r#"`, `br"` and the like: how many hashes, and where the text begins.
fn raw_start(chars: &[char], start: usize) -> Option<(usize, usize)> {
    let before = start.checked_sub(1).map(|at| chars[at]);
    if before.is_some_and(|char| char.is_alphanumeric() || char == '_') {
        return None;
    }
    let mut at = start;
    if matches!(chars[at], 'b' | 'c') {
        at += 1;
    }
    if chars.get(at) != Some(&'r') {
        return None;
    }
    at += 1;
    let first = at;
    while chars.get(at) == Some(&'#') {
        at += 1;
    }
    (chars.get(at) == Some(&'"')).then_some((at - first, at + 1))
}

fn raw_end(chars: &[char], start: usize, hashes: usize) -> usize {
    let mut at = start;
    while at < chars.len() {
        let closes = chars[at] == '"'
            && chars
                .get(at + 1..at + 1 + hashes)
                .is_some_and(|tail| tail.iter().all(|char| *char == '#'));
        if closes {
            return at + 1 + hashes;
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::names;

    fn found(code: &str) -> Vec<String> {
        names(code)
            .into_iter()
            .map(|name| name.segments.join("::"))
            .collect()
    }

    #[test]
    fn use_trees_are_taken_apart() {
        assert_eq!(
            found("use std::{fs, time::{Duration as D, Instant}, io::{self, *}}; use ::aya;"),
            [
                "std::fs",
                "std::time::Duration",
                "std::time::Instant",
                "std::io",
                "std::io::*",
                "aya"
            ]
        );
    }

    #[test]
    fn paths_and_macros_in_code_are_found() {
        assert_eq!(
            found("fn f() { let t = std::time::Instant::now(); println!(x) }"),
            [
                "fn",
                "f",
                "let",
                "t",
                "std::time::Instant::now",
                "println!",
                "x"
            ]
        );
    }

    #[test]
    fn comments_and_literals_do_not_count() {
        let code = "// std::fs\n/* a /* std::fs */ b */ \"std::fs \\\" std::env\" r#\"a\" std::fs\"# \
                    b\"std\" 'x' '\\'' &'a str br\"std::fs\"";
        assert_eq!(found(code), ["a", "str"]);
    }

    #[test]
    fn lines_are_counted_through_everything() {
        let code = "// one\n/* two\n */ \"three\nfour\" std::fs";
        let names = names(code);
        assert_eq!((names.len(), names[0].line), (1, 4));
    }

    #[test]
    fn broken_code_ends() {
        for code in [
            "use std::{fs",
            "use {{{",
            "\"open",
            "/* open",
            "r#\"open",
            "use a as",
            "'\\",
        ] {
            let _ = found(code);
        }
    }
}
