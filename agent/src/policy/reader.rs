//! Walks a parsed TOML tree and collects everything that is wrong with it.
//!
//! A value that cannot be used is reported and otherwise treated as absent, so that one problem
//! neither hides another one nor causes it.

use std::ops::Range;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    error::Problem,
    schema::{SECTIONS, SectionKeys},
};

/// Longest value that is repeated in a problem, in characters.
const MAX_VALUE: usize = 60;

/// A value with its place in the text.
pub(super) type Value<'t> = Spanned<DeValue<'t>>;

/// What is wrong with a value, and what would be right. Both are to be read after the value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub what: String,
    pub allowed: String,
}

impl Complaint {
    pub fn new(what: impl Into<String>, allowed: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            allowed: allowed.into(),
        }
    }
}

/// The problems so far, and the text to find lines and values in.
pub(super) struct Problems<'t> {
    text: &'t str,
    /// Offset of the first byte of each line.
    lines: Vec<usize>,
    found: Vec<Problem>,
}

impl<'t> Problems<'t> {
    pub fn new(text: &'t str) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let lines = std::iter::once(0)
            .chain(ends.map(|(at, _)| at + 1))
            .collect();
        Self {
            text,
            lines,
            found: Vec::new(),
        }
    }

    /// Line and column of a byte, both from 1, the column in characters.
    pub fn place(&self, at: usize) -> (usize, usize) {
        let line = self.lines.partition_point(|start| *start <= at);
        let start = self.lines.get(line.saturating_sub(1)).copied().unwrap_or(0);
        let column = self
            .text
            .get(start..at)
            .map_or(0, |before| before.chars().count());
        (line, column + 1)
    }

    /// Reports a problem with a value.
    pub fn value(&mut self, key: &str, span: Range<usize>, complaint: Complaint) {
        let value = self.written(span.clone());
        self.push(key, span.start, value, complaint);
    }

    /// Reports a problem that has a place but no value: a key, a missing key, a syntax error.
    pub fn key(&mut self, key: &str, at: usize, complaint: Complaint) {
        self.push(key, at, String::new(), complaint);
    }

    fn push(&mut self, key: &str, at: usize, value: String, complaint: Complaint) {
        let (line, column) = self.place(at);
        let Complaint { what, allowed } = complaint;
        self.found.push(Problem {
            line,
            column,
            key: key.to_owned(),
            value,
            what,
            allowed,
        });
    }

    /// The text of a value as one short line.
    fn written(&self, span: Range<usize>) -> String {
        let text = self.text.get(span).unwrap_or_default();
        let mut line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((cut, _)) = line.char_indices().nth(MAX_VALUE) {
            line.truncate(cut);
            line.push('…');
        }
        line.chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    }

    /// Everything that was reported, by line.
    pub fn finish(mut self) -> Vec<Problem> {
        self.found
            .sort_by_key(|problem| (problem.line, problem.column));
        self.found
    }
}

/// What became of a key that was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It is not there.
    Absent,
    /// It was read.
    Good,
    /// It was reported.
    Bad,
}

/// One table, and what its keys are called from outside.
pub(super) struct Section<'p, 't> {
    pub problems: &'p mut Problems<'t>,
    table: &'p DeTable<'t>,
    /// Where the table stands: of its header, or of its value.
    span: Range<usize>,
    path: String,
}

impl<'p, 't> Section<'p, 't> {
    /// Opens a table and reports the keys that do not belong into it.
    pub fn new(
        problems: &'p mut Problems<'t>,
        table: &'p DeTable<'t>,
        span: Range<usize>,
        path: String,
        keys: &SectionKeys,
    ) -> Self {
        let section = Self {
            problems,
            table,
            span,
            path,
        };
        for (key, _) in section.table.iter() {
            let name: &str = key.get_ref();
            if !keys.contains(&name) {
                let what = unknown(name, keys);
                let complaint = Complaint::new(what, keys.join(", "));
                section
                    .problems
                    .key(&section.path_of(name), key.span().start, complaint);
            }
        }
        section
    }

    /// The full name of a key in this table.
    pub fn path_of(&self, key: &str) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let key = match !key.is_empty() && key.chars().all(plain) {
            true => key.to_owned(),
            false => format!("{key:?}"),
        };
        match self.path.as_str() {
            "" => key,
            path => format!("{path}.{key}"),
        }
    }

    /// The value of a key, if it is there.
    pub fn get(&self, key: &str) -> Option<&'p Value<'t>> {
        self.table.get(key)
    }

    /// Reads a key if it is there.
    pub fn set<T>(
        &mut self,
        key: &str,
        target: &mut T,
        rule: impl FnOnce(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Found {
        let Some(value) = self.get(key) else {
            return Found::Absent;
        };
        match rule(value.get_ref()) {
            Ok(read) => {
                *target = read;
                Found::Good
            }
            Err(complaint) => {
                self.complain(key, complaint);
                Found::Bad
            }
        }
    }

    /// Reports a problem with the value of a key, or with the key's absence.
    pub fn complain(&mut self, key: &str, complaint: Complaint) {
        let path = self.path_of(key);
        match self.get(key) {
            Some(value) => self.problems.value(&path, value.span(), complaint),
            None => self.problems.key(&path, self.span.start, complaint),
        }
    }

    /// Opens the table under a key. `None`: there is none, or it is no table, which is reported.
    pub fn table(&mut self, key: &str, keys: &SectionKeys) -> Option<Section<'_, 't>> {
        self.open(key, keys, "must be a table")
    }

    /// As [`Self::table`], for what takes "off" as well; the caller has looked for that.
    pub fn table_or_off(&mut self, key: &str, keys: &SectionKeys) -> Option<Section<'_, 't>> {
        self.open(key, keys, "must be a table or \"off\"")
    }

    fn open(&mut self, key: &str, keys: &SectionKeys, what: &str) -> Option<Section<'_, 't>> {
        let value = self.get(key)?;
        let DeValue::Table(table) = value.get_ref() else {
            self.complain(key, Complaint::new(what, keys.join(", ")));
            return None;
        };
        let path = self.path_of(key);
        Some(Section::new(self.problems, table, value.span(), path, keys))
    }

    /// Reads a list if it is there; each element that is wrong is reported by itself, and then
    /// the result is `None`.
    pub fn list<T>(
        &mut self,
        key: &str,
        allowed: &str,
        mut rule: impl FnMut(&DeValue<'t>) -> Result<T, Complaint>,
    ) -> Option<Vec<T>> {
        let value = self.get(key)?;
        let DeValue::Array(array) = value.get_ref() else {
            self.complain(key, Complaint::new("must be a list", allowed));
            return None;
        };
        let path = self.path_of(key);
        let before = self.problems.found.len();
        let mut read = Vec::new();
        for element in array {
            match rule(element.get_ref()) {
                Ok(good) => read.push(good),
                Err(complaint) => self.problems.value(&path, element.span(), complaint),
            }
        }
        (self.problems.found.len() == before).then_some(read)
    }
}

/// What to say about a key that is not in `keys`.
fn unknown(key: &str, keys: &SectionKeys) -> String {
    let distance = |known: &&&str| edit_distance(key, known);
    let nearest = keys.iter().min_by_key(distance).filter(|near| {
        // One slip in a short word, two in a longer one: beyond that it is another word.
        distance(near) <= if key.len() <= 4 { 1 } else { 2 }
    });
    if let Some(nearest) = nearest {
        return format!("unknown key; did you mean {nearest:?}?");
    }
    match SECTIONS.iter().find(|(_, keys)| keys.contains(&key)) {
        Some((section, _)) => format!("unknown key here; it belongs into {section}"),
        None => "unknown key".to_owned(),
    }
}

/// Slips between two words: characters added, left out, replaced, or swapped with their neighbour.
/// Long keys are not compared: they are no slip.
fn edit_distance(a: &str, b: &str) -> usize {
    const LONGEST: usize = 64;
    if a.len() > LONGEST {
        return usize::MAX;
    }
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // table[i][j]: distance of the first i characters of a and the first j of b.
    let mut table = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            if i == 0 || j == 0 {
                table[i][j] = i + j;
                continue;
            }
            let replaced = table[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(table[i - 1][j] + 1).min(table[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(table[i - 2][j - 2] + 1);
            }
            table[i][j] = best;
        }
    }
    table[a.len()][b.len()]
}
