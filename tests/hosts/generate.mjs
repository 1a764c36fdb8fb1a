// node-llama-cpp as a host: continues a prompt greedily and prints one JSON object. Run in a folder with node_modules:
//     node generate.mjs MODEL cpu|vulkan N_GPU_LAYERS BATCH_SIZE N_TOKENS PROMPT
// Whether a plug-in is there is up to GGML_BACKEND_PATH; nothing here knows of it. The host's log goes to stderr.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [modelPath, gpu, gpuLayers, batchSize, maxTokens, prompt] = process.argv.slice(2);
// From the current folder, not from this file's: the packages are installed outside the source tree.
const entry = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama, LlamaCompletion} = await import(pathToFileURL(entry).href);

const llama = await getLlama({
    gpu: gpu === "cpu" ? false : gpu,
    build: "never",
    skipDownload: true,
    progressLogs: false,
    logLevel: "debug",
    logger: (level, message) => process.stderr.write(message.endsWith("\n") ? message : message + "\n")
});
const model = await llama.loadModel({modelPath, gpuLayers: Number(gpuLayers)});
const context = await model.createContext({contextSize: 256, batchSize: Number(batchSize), threads: 2, flashAttention: gpu === "cpu"});
const completion = new LlamaCompletion({contextSequence: context.getSequence()});
const text = await completion.generateCompletion(prompt, {maxTokens: Number(maxTokens), temperature: 0});
console.log(JSON.stringify({text, gpu: llama.gpu, gpuLayers: model.gpuLayers, devices: await llama.getGpuDeviceNames()}));
await llama.dispose();
