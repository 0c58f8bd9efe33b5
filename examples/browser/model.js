// What an exported file says of itself, and how a picture becomes its input. No dependency.

/** The metadata of an ONNX file: entries (field 14) of its outermost protobuf message, everything else skipped. */
export function readMetadata(buffer) {
  const bytes = new Uint8Array(buffer);
  const about = {};
  for (const [field, start, end] of fieldsOf(bytes, 0, bytes.length)) {
    if (field !== 14) continue;
    const entry = {};
    for (const [part, first, last] of fieldsOf(bytes, start, end)) {
      entry[part] = new TextDecoder().decode(bytes.subarray(first, last));
    }
    about[entry[1]] = entry[2];
  }
  return about;
}

function* fieldsOf(bytes, position, end) {
  const varint = () => {
    let value = 0;
    for (let factor = 1; ; factor *= 128) {
      const byte = bytes[position++];
      value += (byte & 127) * factor;
      if (byte < 128) return value;
    }
  };
  while (position < end) {
    const tag = varint();
    const kind = tag % 8;
    let length = 0;
    if (kind === 0) varint();
    else if (kind === 1) length = 8;
    else if (kind === 2) length = varint();
    else if (kind === 5) length = 4;
    else throw new Error("this is no ONNX file");
    if (kind === 2) yield [Math.floor(tag / 8), position, position + length];
    position += length;
  }
}

/** The RGB bytes of a picture, size x size, resized and cropped as in training. */
export function fit(picture, preprocessing) {
  const { size, resize, crop } = preprocessing;
  const canvas = new OffscreenCanvas(size, size);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, size, size);
  if (crop) {
    const scale = (resize ?? Math.min(picture.width, picture.height)) / Math.min(picture.width, picture.height);
    const [width, height] = [picture.width * scale, picture.height * scale];
    context.drawImage(picture, (size - width) / 2, (size - height) / 2, width, height);
  } else {
    context.drawImage(picture, 0, 0, size, size);
  }
  const rgba = context.getImageData(0, 0, size, size).data;
  const pixels = new Uint8Array(3 * size * size);
  for (let i = 0; i < size * size; i++) pixels.set(rgba.subarray(4 * i, 4 * i + 3), 3 * i);
  return { pixels, canvas };
}

/** Pixels as the tensor that the file takes: bytes (1, h, w, 3), or floats (1, 3, h, w) from 0 to 1. */
export function toTensor(ort, pixels, size, input) {
  if (input.dtype === "uint8") return new ort.Tensor("uint8", pixels, [1, size, size, 3]);
  const planes = new Float32Array(pixels.length);
  for (let i = 0; i < pixels.length; i++) planes[(i % 3) * size * size + Math.floor(i / 3)] = pixels[i] / 255;
  return new ort.Tensor("float32", planes, [1, 3, size, size]);
}

export function softmax(logits) {
  const most = Math.max(...logits);
  const weights = Array.from(logits, (logit) => Math.exp(logit - most));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
}
