#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| headrace_fuzz::host_bringup::run(data));
