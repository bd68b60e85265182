//! Little-endian fields at fixed offsets. Callers hand in arrays or slices of proven length.

pub(crate) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}
pub(crate) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}
pub(crate) fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}
pub(crate) fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A NUL- or space-padded text field; some targets pad with one, some with the other, so both are stripped.
pub(crate) fn text(b: &[u8]) -> String {
    let end = b.iter().position(|&c| c == 0).unwrap_or(b.len());
    String::from_utf8_lossy(&b[..end])
        .trim_end_matches(' ')
        .to_string()
}

/// Write `value` and pad with `pad`; longer text is cut.
pub(crate) fn put_text(b: &mut [u8], at: usize, length: usize, value: &str, pad: u8) {
    let bytes = &value.as_bytes()[..value.len().min(length)];
    b[at..at + length].fill(pad);
    put(b, at, bytes);
}
