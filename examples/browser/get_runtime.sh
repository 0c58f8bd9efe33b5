#!/bin/sh
# Fetch onnxruntime-web from npm into vendor/: three files, 15 MB. Run once; nothing is loaded from elsewhere later.
set -eu
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm pack --silent --pack-destination "$folder" "onnxruntime-web@${1:-^1.21}" >/dev/null
tar -xzf "$folder"/onnxruntime-web-*.tgz -C "$folder"
mkdir -p vendor
for file in ort.wasm.min.mjs ort-wasm-simd-threaded.mjs ort-wasm-simd-threaded.wasm; do
  mv "$folder/package/dist/$file" vendor/
done
echo "vendor/ holds $(sed -n 's/.*"version": "\(.*\)".*/onnxruntime-web \1/p' "$folder/package/package.json")"
